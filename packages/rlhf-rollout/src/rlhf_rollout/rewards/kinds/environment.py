"""The environments' own rewards as the score of an episode."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core import Score, Trajectory


class EnvironmentReward:
    """RewardFunction of what the environment gave: the sum over the turns, which also says where it fell.

    Components: `turns`, and the numbers that the environment logged.
    """

    name = "environment"

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction."""
        return [
            Score(
                value=sum(trajectory.rewards),
                rewards=trajectory.rewards,
                components={
                    "turns": float(trajectory.metadata.get("turns", 0)),
                    **trajectory.metadata.get("environment", {}),
                },
            )
            for trajectory in trajectories
        ]
