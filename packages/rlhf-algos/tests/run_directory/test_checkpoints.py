import pytest
from rlhf_core import DataError
from rlhf_launch.online.checkpoints import CheckpointStore


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


def test_a_crash_between_writing_and_renaming_leaves_the_old_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, {}, fill)
    fill(store.begin(2, {}).folder)  # all files are there, and the process dies
    assert CheckpointStore(tmp_path).latest()[1]["step"] == 1
    unpublished = store.begin(3, {}).folder
    assert [path.name for path in tmp_path.glob(".unfinished*")] == [unpublished.name]  # the dead one is gone
    assert store.steps() == [1]


def test_a_crash_while_the_state_is_written_leaves_the_old_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, {}, fill)
    unpublished = store.begin(2, {"kl": object()})
    with pytest.raises(TypeError):
        store.publish(unpublished)
    assert store.latest()[1]["step"] == 1


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
