"""The run's reward function together with the tokenizer that gives it the text of the responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core import RewardFunction, Trajectory


@dataclass(frozen=True, slots=True)
class Rewarder:
    """A reward and its decoder."""

    reward: RewardFunction
    tokenizer: Any

    def decode(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """The text of each response, without special tokens."""
        return self.tokenizer.batch_decode(
            [list(trajectory.response_token_ids) for trajectory in trajectories], skip_special_tokens=True
        )
