"""Checkpoints of a run whose engines write in the background, or die while they do."""

import types

import pytest
from rlhf_core import RLHFError
from rlhf_launch.online.checkpoints import CheckpointStore
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


@pytest.fixture
def run(tmp_path):
    return types.SimpleNamespace(
        config=types.SimpleNamespace(seed=0, keep_best=None, checkpoint_in_background=True),
        roles=types.SimpleNamespace(policy=Group(), critic=None),
        producer=types.SimpleNamespace(state=lambda: {"prompt_position": 0, "ledger": {}}),
        kl=types.SimpleNamespace(state_dict=dict),
        state=RunState(CheckpointStore(tmp_path, keep=1)),
    )


def at(run, step):
    run.state.step = step
    run.state.save(run)


def test_a_checkpoint_counts_when_all_is_written(run):
    at(run, 1)
    run.state.publish(run)
    assert run.state.store.steps() == []  # still being written: training goes on
    run.roles.policy.write()
    run.state.publish(run)
    assert run.state.store.steps() == [1]
    run.state.publish(run)  # nothing is left to do


def test_the_next_checkpoint_and_the_end_of_the_run_wait_for_it(run):
    at(run, 1)
    at(run, 2)
    assert run.state.store.steps() == [1]
    run.state.publish(run, wait=True)
    assert run.state.store.steps() == [2]


def test_a_failure_in_the_background_stops_the_run_and_leaves_the_old_checkpoint(run):
    at(run, 1)
    run.state.publish(run, wait=True)
    at(run, 2)
    run.roles.policy.fails = True
    with pytest.raises(RLHFError, match="disk is full"):
        run.state.publish(run, wait=True)
    assert run.state.store.steps() == [1]
    path, state = run.state.store.latest()
    assert state["step"] == 1
    assert (path / "policy" / "weights").exists()


def test_without_background_it_counts_at_once(run):
    run.config.checkpoint_in_background = False
    at(run, 1)
    run.state.publish(run)
    assert run.state.store.steps() == [1]
