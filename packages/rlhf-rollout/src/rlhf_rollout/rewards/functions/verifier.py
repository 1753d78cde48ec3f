"""Verifiers, whose work grows with what the model wrote: a response that takes too long to judge scores 0."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core import Closable, DroppedSample, RewardFunction, Score, Trajectory

from rlhf_rollout.concurrency import gather_or_cancel
from rlhf_rollout.rewards.functions.isolated import IsolatedRewardConfig, open_function
from rlhf_rollout.rewards.functions.python import RewardTooSlow


class ZeroIfTooSlow:
    """RewardFunction around a verifier: samples that it cannot judge before its deadline score 0.

    A model can write an expression or a text that takes for ever to compare. It must neither stop the run nor be
    spared the bad score by doing so. A batch whose verifier raises RewardTooSlow is scored again, each sample by
    itself. Component: `too_slow`.
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
        """Close the verifier."""
        if isinstance(self._reward, Closable):
            self._reward.close()


def _in_time(score: Score | DroppedSample) -> Score | DroppedSample:
    if isinstance(score, DroppedSample):
        return score
    return Score(value=score.value, components={**score.components, "too_slow": 0.0}, rewards=score.rewards)


def open_verifier(
    config: IsolatedRewardConfig, *, name: str, isolated: bool
) -> tuple[RewardFunction, frozenset[str]]:
    """A function whose work a response can make endless as a reward, and the columns of the data that it needs.

    Only a function in processes of its own can be ended: without `isolated`, a hanging one is an error.
    """
    reward, columns = open_function(config, name=name, isolated=isolated)
    return (ZeroIfTooSlow(reward, name=name) if isolated else reward), columns
