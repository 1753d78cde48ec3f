"""ZeroIfTooSlow: only the samples that miss the deadline alone score 0; other failures go on."""

import asyncio

import pytest
from reward_ground import trajectory
from rlhf_core import RewardError, Score
from rlhf_rollout import PythonReward, RewardTooSlow, ZeroIfTooSlow


class Slow:
    """Too slow for every batch with the text `slow`; broken by `bad`."""

    def __init__(self):
        self.calls = []

    async def score(self, trajectories, texts):
        self.calls.append(list(texts))
        if "bad" in texts:
            raise RewardError("broken")
        if "slow" in texts:
            raise RewardTooSlow("late")
        return [Score(value=1.0, components={"x": 2.0}) for _ in texts]


def run(reward, *texts):
    return asyncio.run(reward.score([trajectory(i) for i in range(len(texts))], texts))


def test_the_slow_one_scores_zero_and_the_others_keep_their_scores():
    slow = Slow()
    found = run(ZeroIfTooSlow(slow, name="r"), "a", "slow", "b")
    assert [score.value for score in found] == [1.0, 0.0, 1.0]
    assert found[0].components == {"x": 2.0, "too_slow": 0.0}
    assert found[1].components == {"too_slow": 1.0}
    assert slow.calls == [["a", "slow", "b"], ["a"], ["slow"], ["b"]]


def test_other_failures_are_no_bad_score():
    with pytest.raises(RewardError, match="broken"):
        run(ZeroIfTooSlow(Slow(), name="r"), "a", "bad")


def test_a_function_that_misses_its_deadline_says_so_by_the_error():
    async def waits(completion):
        await asyncio.sleep(5)

    with pytest.raises(RewardTooSlow):
        run(PythonReward(waits, timeout_s=0.05), "a")
