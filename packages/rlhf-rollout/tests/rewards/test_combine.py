"""ModelReward and CombinedReward."""

import asyncio
from collections.abc import Sequence

import pytest
import torch
from rlhf_core import ConfigError, LogProbMeaning, ModelOutputs, RewardError, RewardFunction, Score, Trajectory
from rlhf_rollout import CombinedReward, ModelReward


def trajectory(index: int, *, response: int = 1, temperature: float = 1.0) -> Trajectory:
    return Trajectory(
        sample_id=f"s{index}",
        group_id="g",
        token_ids=(5,) + (7,) * response,
        response_mask=(False,) + (True,) * response,
        rollout_log_probs=(0.0,) + (-0.5,) * response,
        weight_versions=(-1,) + (0,) * response,
        meaning=LogProbMeaning(temperature=temperature),
    )


class CountingScorer:
    """Scores a row by its number of tokens."""

    def score(self, batch, outputs=("log_probs",)):
        assert tuple(outputs) == ("scores",)
        return ModelOutputs(scores=batch.lengths.float())


class Fixed:
    """Gives what it was made with."""

    def __init__(self, *scores: Score) -> None:
        self.scores = list(scores)

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        return self.scores


def run(reward: RewardFunction, trajectories: Sequence[Trajectory]) -> list[Score]:
    return asyncio.run(reward.score(trajectories, [""] * len(trajectories)))


def test_a_model_scores_the_tokens_themselves():
    trajectories = [trajectory(0, response=1), trajectory(1, response=3, temperature=0.5)]
    assert [score.value for score in run(ModelReward(CountingScorer()), trajectories)] == [2.0, 4.0]
    assert run(ModelReward(CountingScorer()), []) == []


def test_a_model_that_gives_nan_is_named_with_the_sample():
    class Broken:
        def score(self, batch, outputs=("log_probs",)):
            return ModelOutputs(scores=torch.tensor([0.0, float("nan")]))

    with pytest.raises(RewardError, match="reward model returned nan for sample 's1'"):
        run(ModelReward(Broken()), [trajectory(0), trajectory(1)])


def test_parts_are_weighted_and_logged_unweighted():
    combined = CombinedReward(
        {
            "right": Fixed(Score(value=1.0), Score(value=0.0)),
            "form": Fixed(*[Score(value=2.0, components={"len": 3})] * 2),
        },
        weights={"form": 0.5},
    )
    first, second = run(combined, [trajectory(0), trajectory(1)])
    assert first == Score(value=2.0, components={"right": 1.0, "form": 2.0, "form/len": 3})
    assert second.value == 1.0


def test_every_part_must_score_every_sample():
    with pytest.raises(RewardError, match="reward short returned 1 scores for 2"):
        run(CombinedReward({"short": Fixed(Score(value=1.0))}), [trajectory(0), trajectory(1)])


def test_refusals():
    with pytest.raises(ConfigError, match="at least one part"):
        CombinedReward({})
    with pytest.raises(ConfigError, match=r"'b'.*parts a"):
        CombinedReward({"a": Fixed()}, weights={"b": 1.0})


@pytest.mark.parametrize("reward", [ModelReward(CountingScorer()), CombinedReward({"a": Fixed()})])
def test_they_are_reward_functions(reward):
    assert isinstance(reward, RewardFunction)
