"""Scores from a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlhf_core import RewardFunction, Score, Trajectory, check_scores, collate

from rlhf_rollout.rewards.batched_scorer import JoinedScorer, Scorer
from rlhf_rollout.rewards.kind import EngineRewardConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRewardConfig(EngineRewardConfig):
    """A reward model: sequence classification with one label, over the policy's vocabulary."""

    reads_policy_tokens: ClassVar[bool] = True

    kind: Literal["model"] = "model"

    def make(self, engine: Scorer, *, name: str, tokenizer: Any, policy_tokenizer: Any) -> RewardFunction:
        """See EngineRewardConfig."""
        return ModelReward(engine, name=name)


class ModelReward:
    """RewardFunction from a reward model, which reads the very tokens that were sampled."""

    def __init__(self, engine: Scorer, *, name: str = "reward model") -> None:
        """`engine` is in the reward role."""
        self.name = name
        self._engine = JoinedScorer(engine)

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction; `texts` are not used.

        Raises:
            RewardError: the model gave a score that is not finite.
        """
        if not trajectories:
            return []
        # The temperature has no say in a row's score, so samples of several temperatures may share a batch.
        batch = collate(trajectories, temperature=1.0)
        outputs = await self._engine.score(batch, ("scores",))
        if outputs.scores is None:
            raise TypeError(f"{self.name}: the engine gave no `scores`; use one in the reward role")
        scores = [Score(value=value) for value in outputs.scores.tolist()]
        check_scores(scores, trajectories, source=self.name)
        return scores

    def close(self) -> None:
        """End the thread that asks the model; the engine is left as it is."""
        self._engine.close()
