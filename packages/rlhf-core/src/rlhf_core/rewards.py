"""The reward seam: a batch of finished trajectories in, one score each out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from rlhf_core.errors import RewardError
from rlhf_core.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The score of one trajectory, with the named parts it is made of."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class RewardFunction(Protocol):
    """Python callables, HTTP services and reward models look the same to the loop."""

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """One score per trajectory, in order. `texts` are the decoded responses."""
        ...


def check_scores(scores: Sequence[Score], trajectories: Sequence[Trajectory], *, source: str) -> None:
    """Refuse scores of the wrong number or kind, naming the samples.

    Raises:
        RewardError: fewer or more scores than trajectories, or a score that is not a finite number.
    """
    if len(scores) != len(trajectories):
        raise RewardError(
            f"reward {source} returned {len(scores)} scores for {len(trajectories)} trajectories; "
            "return exactly one per trajectory, in order"
        )
    for score, trajectory in zip(scores, trajectories, strict=True):
        if not math.isfinite(score.value):
            raise RewardError(
                f"reward {source} returned {score.value} for sample {trajectory.sample_id!r}; "
                "return a finite number"
            )
