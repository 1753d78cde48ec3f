import pytest
from rlhf_core import DataError
from rlhf_launch.checkpoints import CheckpointStore


def fill(folder):
    (folder / "weights").write_text("w")


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.write(step, {"kl": step / 10}, fill)
    path, state = store.latest()
    assert state == {"step": 10, "kl": 1.0}
    assert (path / "weights").read_text() == "w"
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
    assert store.latest()[1]["step"] == 1
    store.write(2, {}, fill)
    assert store.steps() == [2]


def test_the_same_step_can_be_written_again(tmp_path):
    store = CheckpointStore(tmp_path)
    store.write(3, {"try": 1}, fill)
    store.write(3, {"try": 2}, fill)
    assert store.latest()[1]["try"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003"]


def test_nothing_to_resume_is_an_error_not_an_empty_state(tmp_path):
    with pytest.raises(DataError, match="nothing to resume"):
        CheckpointStore(tmp_path).latest()
