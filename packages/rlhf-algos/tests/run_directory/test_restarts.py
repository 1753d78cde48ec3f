"""A run that lost a worker begins again from its newest checkpoint, so often and no more; other ends are final."""

import pytest
from rlhf_algos import CheckpointStore, can_begin_again, with_restarts
from rlhf_core import (
    ConfigError,
    DeadlineExceeded,
    EngineDiedError,
    RLHFError,
    RunStopped,
    StopRequest,
    TrainingDivergedError,
    WeightSyncError,
)


class Run:
    """Attempts that checkpoint a step each, and end by these errors, one after the other, before they succeed."""

    def __init__(self, store, *errors):
        self.store, self.errors = store, list(errors)
        self.begun, self.said = [], []

    def __call__(self, begin):
        step = 0 if begin is None else begin.step
        self.begun.append(step)
        self.store.publish(self.store.begin(step + 1, {}))
        if self.errors:
            raise self.errors.pop(0)
        return step + 1

    def run(self, *, limit, begin=None, stop=None):
        stop = stop or StopRequest()
        return with_restarts(self, begin, self.store, limit=limit, stop=stop, say=self.said.append)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path)


def test_each_attempt_goes_on_from_the_newest_checkpoint_and_says_why(store):
    run = Run(store, EngineDiedError("policy-1 died"), DeadlineExceeded("nothing moved"))
    assert run.run(limit=2) == 3
    assert run.begun == [0, 1, 2]
    assert run.said == [
        "policy-1 died\nrestart 1 of 2: the run begins again after step 1",
        "nothing moved\nrestart 2 of 2: the run begins again after step 2",
    ]


def test_without_a_checkpoint_it_begins_at_its_start(store):
    said, errors = [], [EngineDiedError("policy-0 died")]

    def attempt(begin):
        assert begin is None
        if errors:
            raise errors.pop()
        return "done"

    assert with_restarts(attempt, None, store, limit=1, stop=StopRequest(), say=said.append) == "done"
    assert "again from its start, since it has no checkpoint yet" in said[0]


def test_when_restarts_are_used_up_the_last_error_tells_of_the_first(store):
    run = Run(store, EngineDiedError("policy-1 died"), EngineDiedError("critic-0 died"))
    with pytest.raises(EngineDiedError, match="critic-0 died") as caught:
        run.run(limit=1)
    assert caught.value.__notes__ == ["the run had begun again 1 time(s); at first because: policy-1 died"]


def test_a_run_that_was_asked_to_end_does_not_begin_again(store):
    stop = StopRequest()
    stop.ask("SIGTERM was received")
    run = Run(store, EngineDiedError("policy-1 died"))
    with pytest.raises(EngineDiedError):
        run.run(limit=3, stop=stop)
    assert run.begun == [0]


@pytest.mark.parametrize(
    "error", [ConfigError("a key"), RunStopped("asked to"), TrainingDivergedError("nan"), WeightSyncError("gap")]
)
def test_what_would_come_again_is_final(store, error):
    run = Run(store, error)
    with pytest.raises(type(error)):
        run.run(limit=3)
    assert run.begun == [0]


def test_a_lost_worker_is_found_behind_what_it_caused():
    sync = WeightSyncError("could not be sent")
    sync.__cause__ = DeadlineExceeded("waited 60 s")
    assert can_begin_again(sync)
    refused = ConfigError("a key")
    refused.__cause__ = EngineDiedError("gone")
    assert not can_begin_again(refused)
    assert not can_begin_again(RLHFError("something else"))


def test_an_error_that_is_its_own_cause_is_looked_at_once():
    error = RLHFError("no network")
    error.__cause__ = error
    assert not can_begin_again(error)
