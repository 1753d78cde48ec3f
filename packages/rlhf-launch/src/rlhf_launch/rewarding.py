"""Scores of a step's trajectories, from the run's reward functions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlhf_core import RewardError, RewardFunction, Score, Trajectory, check_scores, keep_scored


class Rewarder:
    """A reward function together with the tokenizer that gives it the text of the responses."""

    def __init__(self, reward: RewardFunction, tokenizer: Any) -> None:
        self._reward = reward
        self._tokenizer = tokenizer

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in order.

        Raises:
            RewardError: the function raised, hung, or returned the wrong number or kind of scores.
        """
        texts = self._tokenizer.batch_decode(
            [list(trajectory.response_token_ids) for trajectory in trajectories], skip_special_tokens=True
        )
        scores = asyncio.run(self._reward.score(trajectories, texts))
        check_scores(scores, trajectories, source=type(self._reward).__name__)
        _, kept, failed = keep_scored(trajectories, scores)
        if failed:
            raise RewardError(
                f"{len(failed)} of {len(scores)} samples have no score, the first is {failed[0].sample_id!r}: "
                f"{failed[0].reason}",
                sample_ids=tuple(failure.sample_id for failure in failed),
            )
        return kept
