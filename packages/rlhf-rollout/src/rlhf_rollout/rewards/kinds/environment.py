"""The environments' own rewards as the score of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_core import RewardFunction, Score, Trajectory

from rlhf_rollout.rewards.kind import RewardConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentRewardConfig(RewardConfig):
    """What the environment or the program of an agent's episodes gave."""

    kind: Literal["environment"] = "environment"

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs: none."""
        return EnvironmentReward(), frozenset()


class EnvironmentReward:
    """RewardFunction that takes what an environment or a program gave, and where each part of it fell.

    It is the sum over the turns, or what the trajectory's metadata say was `earned` in the whole episode.
    Components: `turns`, and the numbers that the environment logged.
    """

    name = "environment"

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction."""
        return [
            Score(
                value=float(trajectory.metadata.get("earned", sum(trajectory.rewards))),
                rewards=trajectory.rewards,
                components={
                    "turns": float(trajectory.metadata.get("turns", 0)),
                    **trajectory.metadata.get("environment", {}),
                },
            )
            for trajectory in trajectories
        ]

    def placed(self, trajectory: Trajectory) -> Sequence[float]:
        """See PlacesRewards."""
        return trajectory.rewards
