import pytest
import torch
from rlhf_train.checkpoint.background import PendingFiles, SaveThread


class Writer:
    name = "writer"

    def __init__(self):
        self.written = []

    def save(self, state, path):
        self.written.append((path, state))


def test_what_is_written_is_what_was_there_when_it_was_saved():
    writer = Writer()
    files = PendingFiles(writer)
    state = {"weights": [torch.zeros(2)], "step": 3}
    files.save(state, "a")
    state["weights"][0] += 1
    state["step"] = 4
    assert writer.written == []
    files.write()
    ((path, found),) = writer.written
    assert (path, found["step"], found["weights"][0].tolist()) == ("a", 3, [0, 0])
    assert files.name == "writer", "all else is the writer's"


def test_a_save_is_finished_once(tmp_path):
    finished = []
    pending = SaveThread(tmp_path, lambda: None, finished.append)
    pending.wait()
    pending.wait()
    assert finished == [None]
    assert pending.written


def test_an_error_of_the_thread_reaches_the_caller(tmp_path):
    def full() -> None:
        raise OSError("disk full")

    def finish(error):
        raise RuntimeError(error)

    with pytest.raises(RuntimeError, match="OSError: disk full"):
        SaveThread(tmp_path, full, finish).wait()
