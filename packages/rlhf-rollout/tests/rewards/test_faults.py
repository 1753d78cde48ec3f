"""RobustReward: what is tried again, what is dropped, what stops the run; nothing is lost or changed silently."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_ground import score, trajectory
from rlhf_core import ConfigError, DataError, DroppedSample, EngineDiedError, RewardError, Score
from rlhf_rollout import CombinedReward, FailureHandling, PythonReward, RobustReward

DROP = FailureHandling(attempts=1, then="drop")


class Faulty:
    """Scores a text by its length; fails on batches that hold a text in `bad`."""

    name = "faulty"

    def __init__(self, bad=(), *, fail=None, named=False):
        self.bad, self.named, self.batches = set(bad), named, []
        self.fail = fail

    async def score(self, trajectories, texts):
        self.batches.append(list(texts))
        found = [t.sample_id for t, text in zip(trajectories, texts, strict=True) if text in self.bad]
        if found:
            raise self.fail or RewardError("no", sample_ids=tuple(found) if self.named else ())
        return [Score(value=float(len(text))) for text in texts]


class Passing(Faulty):
    """Fails the first `times` calls."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    async def score(self, trajectories, texts):
        self.times -= 1
        if self.times >= 0:
            raise ConnectionError("for a moment")
        return await super().score(trajectories, texts)


def test_a_passing_fault_is_tried_again():
    reward = RobustReward(Passing(2), FailureHandling(attempts=3, backoff_s=0.001))
    assert [s.value for s in score(reward, ["", "a"])] == [0.0, 1.0]
    assert (reward.report.failed_attempts, reward.report.dropped) == (2, 0)


def test_the_first_failed_attempt_is_told_and_the_others_are_counted(caplog):
    reward = RobustReward(Passing(3), FailureHandling(attempts=4, backoff_s=0.001))
    score(reward, ["a"])
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert reward.report.failed_attempts == 3


def test_stop_raises_the_first_cause():
    reward = RobustReward(Passing(9), FailureHandling(attempts=2, backoff_s=0.001))
    with pytest.raises(RewardError, match="reward faulty raised ConnectionError: for a moment"):
        score(reward, ["a"])
    assert reward.report.failed_attempts == 2


@pytest.mark.parametrize("named", [True, False])
def test_drop_leaves_out_the_sample_at_fault_alone(named):
    inner = Faulty(["bad"], named=named)
    reward = RobustReward(inner, DROP)
    found = score(reward, ["a", "bb", "bad", "cccc", "d"])
    assert [s.value if isinstance(s, Score) else s.sample_id for s in found] == [1.0, 2.0, "s2", 4.0, 1.0]
    assert reward.report.dropped == 1
    assert reward.report.latest == (DroppedSample(sample_id="s2", reason="no"),)
    assert ["bad"] in inner.batches


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.booleans())
def test_every_sample_has_its_own_outcome(bad, named):
    texts = ["bad" if fault else "x" * index for index, fault in enumerate(bad)]
    found = score(RobustReward(Faulty(["bad"], named=named), DROP), texts)
    expected = ["failed" if fault else float(index) for index, fault in enumerate(bad)]
    assert ["failed" if isinstance(s, DroppedSample) else s.value for s in found] == expected
    assert [s.sample_id for s in found if isinstance(s, DroppedSample)] == [
        f"s{i}" for i, fault in enumerate(bad) if fault
    ]


@pytest.mark.parametrize("returned", [[], [Score(value=1.0)] * 3, [Score(value=float("nan"))] * 2])
def test_unusable_scores_are_failures(returned):
    class Wrong:
        async def score(self, trajectories, texts):
            return returned

    assert all(isinstance(s, DroppedSample) for s in score(RobustReward(Wrong(), DROP), ["a", "b"]))


def test_nan_costs_only_its_own_sample():
    reward = RobustReward(PythonReward(lambda completion: float(completion or "nan")), DROP)
    assert [type(s) for s in score(reward, ["1", "", "2"])] == [Score, DroppedSample, Score]


def test_a_coroutine_that_hangs_is_ended():
    class Hanging:
        async def score(self, trajectories, texts):
            await asyncio.sleep(60)

    (failed,) = score(RobustReward(Hanging(), FailureHandling(attempts=1, then="drop", timeout_s=0.05)), ["a"])
    assert failed.reason == "reward Hanging did not return within 0.05 s"


def test_a_function_that_hangs_is_left_behind_and_dropped():
    import threading

    release = threading.Event()
    inner = PythonReward(lambda completion: release.wait(30) if completion == "hang" else 1.0, timeout_s=0.3)
    found = score(RobustReward(inner, DROP), ["a", "hang"])
    release.set()
    assert [type(s) for s in found] == [Score, DroppedSample]
    assert "did not return within 0.3 s" in found[1].reason


@pytest.mark.parametrize("error", [DataError("no such column"), EngineDiedError("gone")])
def test_what_is_no_fault_of_a_sample_stops_at_once(error):
    inner = Faulty(["a"], fail=error)
    with pytest.raises(type(error)):
        score(RobustReward(inner, FailureHandling(attempts=5, then="drop")), ["a", "b"])
    assert len(inner.batches) == 1


def test_too_many_drops_in_a_row_stop_the_run():
    reward = RobustReward(Faulty(["a"]), FailureHandling(attempts=1, then="drop", max_dropped_in_a_row=3))
    score(reward, ["a", "a"])
    score(reward, ["fine"])
    score(reward, ["a", "a"])
    with pytest.raises(RewardError, match="failed for 3 samples in a row"):
        score(reward, ["a"])


def test_what_a_part_drops_a_sum_drops():
    robust = RobustReward(Faulty(["bad"]), DROP)
    found = score(CombinedReward({"one": Faulty(), "two": robust}), ["a", "bad"])
    assert found[0] == Score(value=2.0, components={"one": 1.0, "two": 1.0})
    assert found[1] == DroppedSample(sample_id="s1", reason="two: no")


def test_the_first_part_to_fail_ends_the_others():
    ended = []

    class Waiting:
        async def score(self, trajectories, texts):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append(True)
                raise

    with pytest.raises(RewardError, match="no"):
        score(CombinedReward({"wait": Waiting(), "fail": Faulty(["a"])}), ["a"])
    assert ended == [True]


def test_many_batches_at_once():
    reward = RobustReward(Faulty(["bad"]), DROP)

    async def all_of_them():
        return await asyncio.gather(
            *(reward.score([trajectory(i), trajectory(i + 100)], ["x" * i, "bad"]) for i in range(20))
        )

    found = asyncio.run(all_of_them())
    assert [batch[0].value for batch in found] == [float(i) for i in range(20)]
    assert [batch[1].sample_id for batch in found] == [f"s{i + 100}" for i in range(20)]


@pytest.mark.parametrize(
    "changes", [{"attempts": 0}, {"backoff_s": -1}, {"then": "retry"}, {"max_dropped_in_a_row": 0}]
)
def test_settings_are_checked(changes):
    with pytest.raises(ConfigError, match="reward on_failure"):
        FailureHandling(**changes)
