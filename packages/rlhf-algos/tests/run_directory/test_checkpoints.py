import json

import pytest
import torch
from rlhf_algos import CheckpointStore
from rlhf_core import CheckpointError, DataError


def fill(folder):
    (folder / "weights").write_text("w")


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.write(step, {"kl": step / 10}, fill)
    saved = store.latest()
    assert (saved.step, saved.state) == (10, {"step": 10, "kl": 1.0})
    assert (saved.path / "weights").read_text() == "w"
    assert store.steps() == [2, 10]


def test_a_crash_while_writing_leaves_the_old_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, {}, fill)

    def crash(folder):
        fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.write(2, {}, crash)
    assert store.steps() == [1]
    assert store.latest().state["step"] == 1
    store.write(2, {}, fill)
    assert store.steps() == [2]


def test_the_same_step_can_be_written_again(tmp_path):
    store = CheckpointStore(tmp_path)
    store.write(3, {"try": 1}, fill)
    store.write(3, {"try": 2}, fill)
    assert store.latest().state["try"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003"]


def test_nothing_to_resume_is_an_error_not_an_empty_state(tmp_path):
    with pytest.raises(DataError, match="nothing to resume"):
        CheckpointStore(tmp_path).latest()


def test_a_crash_between_writing_and_renaming_leaves_the_old_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, {}, fill)
    fill(store.begin(2, {}).folder)  # all files are there, and the process dies
    assert CheckpointStore(tmp_path).latest().state["step"] == 1
    unpublished = store.begin(3, {}).folder
    assert [path.name for path in tmp_path.glob(".unfinished*")] == [unpublished.name]  # the dead one is gone
    assert store.steps() == [1]


def test_a_crash_while_the_state_is_written_leaves_the_old_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, {}, fill)
    unpublished = store.begin(2, {"kl": object()})
    with pytest.raises(TypeError):
        store.publish(unpublished)
    assert store.latest().state["step"] == 1


@pytest.mark.parametrize(("best", "kept"), [("max", [2, 4]), ("min", [1, 4])])
def test_the_best_one_stays(tmp_path, best, kept):
    store = CheckpointStore(tmp_path, keep=1, best=best)
    for step, score in enumerate((0.1, 0.9, float("nan"), None), start=1):
        store.write(step, {"score": score}, fill)
    assert store.steps() == kept


def test_the_later_of_equally_good_ones_stays(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for step in range(1, 5):
        store.write(step, {"score": 0.5}, fill)
    assert store.best() == 4
    assert store.steps() == [4]


def test_large_state_is_a_tensor_file_beside_the_small_json(tmp_path):
    store = CheckpointStore(tmp_path)
    unpublished = store.begin(1, {"kl": 0.1}, {"tokens": torch.arange(1000)})
    store.publish(unpublished)
    assert torch.equal(store.latest().tensors()["tokens"], torch.arange(1000))
    assert store.latest().state == {"step": 1, "kl": 0.1}
    store.write(2, {}, fill)
    assert store.latest().tensors() == {}


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def change(path):
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize("name", ["weights", "inner/shard", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [cut, change, lambda path: path.unlink()])
def test_a_damaged_newest_checkpoint_falls_back_aloud_to_the_one_before(tmp_path, name, harm):
    said = []
    store = CheckpointStore(tmp_path, say=said.append)

    def fill_more(folder):
        fill(folder)
        (folder / "inner").mkdir()
        (folder / "inner" / "shard").write_bytes(b"12345")

    for step in (1, 2):
        store.write(step, {}, fill_more)
    harm(tmp_path / "step-000002" / name)
    if name == "manifest.json" and harm is cut:
        return  # its last byte is the end of a line
    assert store.latest().step == 1
    assert len(said) == 1
    assert "step-000002" in said[0]
    assert name in said[0]


def test_all_damaged_is_an_error_that_names_the_file(tmp_path):
    store = CheckpointStore(tmp_path, say=lambda line: None)
    store.write(1, {}, fill)
    (tmp_path / "step-000001" / "weights").unlink()
    with pytest.raises(CheckpointError, match=r"step-000001' is damaged: weights is missing; there is no other"):
        store.latest()


def test_what_was_damaged_goes_when_the_run_saves_again_and_the_good_one_stays(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, say=lambda line: None)
    for step in (8, 10):
        store.write(step, {}, fill)
    cut(tmp_path / "step-000010" / "weights")
    assert store.latest().step == 8
    store.write(9, {}, fill)
    assert store.steps() == [8, 9]


def test_the_manifest_lists_every_file_with_its_size(tmp_path):
    CheckpointStore(tmp_path).write(1, {}, fill)
    listed = json.loads((tmp_path / "step-000001" / "manifest.json").read_text())["files"]
    assert sorted(listed) == ["state.json", "weights"]
    assert listed["weights"]["bytes"] == 1
