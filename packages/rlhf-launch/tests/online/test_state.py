"""Checkpoints of a run whose engines write in the background, or die while they do."""

import types

import pytest
from rlhf_algos import CheckpointStore
from rlhf_core import RLHFError
from rlhf_launch.online.state import RunState


class Group:
    """A role that writes when the test says so."""

    name = "policy"

    def __init__(self):
        self.writing = None
        self.fails = False

    def save(self, path, *, background):
        path.mkdir()
        self.writing = path
        if not background:
            self.write()

    def write(self):
        (self.writing / "weights").write_text("w")
        self.writing = None

    def saved(self):
        return self.writing is None

    def finish_save(self):
        if self.fails:
            raise RLHFError("the disk is full")
        if self.writing is not None:
            self.write()


class Run:
    """The state of a run whose only engine is a `Group`."""

    def __init__(self, folder, *, background=True):
        self.policy = Group()
        producer = types.SimpleNamespace(state=lambda: ({"prompt_position": 0, "ledger": {}}, []))
        kl = types.SimpleNamespace(state_dict=dict)
        self.store = CheckpointStore(folder, keep=1)
        self.state = RunState(self.store, [self.policy], producer, kl, background=background)

    def at(self, step):
        self.state.step = step
        self.state.save()


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_checkpoint_counts_when_all_is_written(run):
    run.at(1)
    run.state.publish()
    assert run.store.steps() == []  # still being written: training continues
    run.policy.write()
    run.state.publish()
    assert run.store.steps() == [1]
    run.state.publish()  # nothing is left to do


def test_the_next_checkpoint_and_the_end_of_the_run_wait_for_it(run):
    run.at(1)
    run.at(2)
    assert run.store.steps() == [1]
    run.state.publish(wait=True)
    assert run.store.steps() == [2]


def test_a_failure_in_the_background_stops_the_run_and_leaves_the_old_checkpoint(run):
    run.at(1)
    run.state.publish(wait=True)
    run.at(2)
    run.policy.fails = True
    with pytest.raises(RLHFError, match="disk is full"):
        run.state.publish(wait=True)
    assert run.store.steps() == [1]
    saved = run.store.latest()
    assert saved.state["step"] == 1
    assert (saved.path / "policy" / "weights").exists()


def test_without_background_it_counts_at_once(tmp_path):
    run = Run(tmp_path, background=False)
    run.at(1)
    run.state.publish()
    assert run.store.steps() == [1]


def test_a_score_belongs_to_the_checkpoint_of_its_step(run):
    run.at(1)
    run.state.rate(0.5)
    run.state.step = 2  # the checkpoint of step 1 is still being written
    run.state.rate(0.9)
    run.state.publish(wait=True)
    assert run.store.latest().state["score"] == 0.5
