"""The scored samples of one prompt: what generation hands to training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from rlhf_core import LogProbMeaning, Score, Trajectory
from rlhf_rollout import ScoredGroup
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The scored samples of one prompt."""

    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...]

    @property
    def scores_differ(self) -> bool:
        """True if its scores differ: equal ones give advantages of zero in every group-relative algorithm."""
        values = [score.value for score in self.scores]
        return bool(values) and max(values) - min(values) > 1e-8


def group_of(scored: ScoredGroup) -> Group:
    """The samples that have a score."""
    # Where a score says that its parts fell (a process reward) travels with the tokens.
    placed = [
        replace(trajectory, rewards=score.rewards) if score.rewards else trajectory
        for trajectory, score in zip(scored.trajectories, scored.scores, strict=True)
    ]
    return Group(trajectories=tuple(placed), scores=scored.scores)


def group_index(trajectories: Sequence[Trajectory]) -> Int[Tensor, " rows"]:
    """Samples of one prompt share a number."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(t.group_id, len(numbers)) for t in trajectories])


def oldest_version(trajectory: Trajectory) -> int:
    """Version of the weights that sampled the oldest token; -1 if none was sampled."""
    return min((version for version in trajectory.weight_versions if version >= 0), default=-1)


def group_to_plain(group: Group) -> dict[str, Any]:
    """A group as JSON can hold it."""
    return {
        "trajectories": [asdict(trajectory) for trajectory in group.trajectories],
        "scores": [asdict(score) for score in group.scores],
    }


def group_from_plain(data: Mapping[str, Any]) -> Group:
    """Inverse of `group_to_plain`."""
    return Group(
        trajectories=tuple(_trajectory(item) for item in data["trajectories"]),
        scores=tuple(Score(**{**item, "rewards": tuple(item["rewards"])}) for item in data["scores"]),
    )


def is_json(value: Any) -> bool:
    """Whether JSON can hold a value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _trajectory(data: Mapping[str, Any]) -> Trajectory:
    tuples = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    return Trajectory(**{**data, **tuples, "meaning": LogProbMeaning(**data["meaning"])})
