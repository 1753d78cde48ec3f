"""Rewards whose work grows with what the model wrote: a response that takes too long to judge is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core import DroppedSample, RewardError, RewardFunction, Score, Trajectory

from rlhf_rollout.concurrency import gather_or_cancel


class RewardTooSlow(RewardError):
    """A reward missed its deadline."""


class ZeroIfTooSlow:
    """RewardFunction around one that raises RewardTooSlow: the samples that it cannot judge in time score 0.

    A batch that misses the deadline is scored again, each sample by itself. Component: `too_slow`.

    For verifiers alone: a model can write an expression or a text that takes for ever to compare, and must neither
    stop the run nor be spared the bad score by doing so.
    """

    def __init__(self, reward: RewardFunction, *, name: str) -> None:
        self.name = name
        self._reward = reward

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score | DroppedSample]:
        """See RewardFunction."""
        try:
            scores = await self._reward.score(trajectories, texts)
        except RewardTooSlow:
            if len(trajectories) == 1:
                return [Score(value=0.0, components={"too_slow": 1.0})]
            singles = [self.score([t], [text]) for t, text in zip(trajectories, texts, strict=True)]
            return [score for (score,) in await gather_or_cancel(singles)]
        return [_in_time(score) for score in scores]

    def close(self) -> None:
        """Close the reward in it."""
        if (close := getattr(self._reward, "close", None)) is not None:
            close()


def _in_time(score: Score | DroppedSample) -> Score | DroppedSample:
    if isinstance(score, DroppedSample):
        return score
    return Score(value=score.value, components={**score.components, "too_slow": 0.0}, rewards=score.rewards)
