"""The reward seam: a batch of finished trajectories in, one score each out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from rlhf_core.data.packed import FloatsLike, PackedDoubles
from rlhf_core.data.trajectory import Trajectory
from rlhf_core.errors import RewardError


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The score of one trajectory, with the named parts it is made of."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    rewards: PackedDoubles = field(default_factory=PackedDoubles)
    """[length of the trajectory] Where in it parts of the score fell (the steps of a process reward), 0 elsewhere;
    empty if the score is for the whole. Any sequence or array may be given."""

    if TYPE_CHECKING:

        def __init__(
            self, *, value: float, components: Mapping[str, float] = ..., rewards: FloatsLike = ()
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", PackedDoubles.of(self.rewards))


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedSample:
    """A sample to leave out, in the place of a score, or of a trajectory, that could not be had."""

    sample_id: str
    reason: str
    """For people: the last error."""


@runtime_checkable
class RewardFunction(Protocol):
    """Scores finished trajectories. Python callables, HTTP services and reward models look the same to the loop.

    `score` may be called many times at once, also while samples are being generated: it does its work off the
    event loop.
    """

    async def score(
        self, trajectories: Sequence[Trajectory], texts: Sequence[str]
    ) -> Sequence[Score | DroppedSample]:
        """One score per trajectory, in order. `texts` are the decoded responses.

        `DroppedSample` drops a sample on purpose. A function that cannot score raises RewardError instead, and
        the failure handling of the run decides.
        """
        ...


@runtime_checkable
class PlacesRewards(Protocol):
    """A reward that pays for what was earned at certain tokens, of any trajectory of an episode.

    `score` is asked about the last trajectory of an episode alone; this, about the others.
    """

    def placed(self, trajectory: Trajectory) -> Sequence[float]:
        """[length] What the reward pays at each token, or nothing."""
        ...


def check_scores(
    scores: Sequence[Score | DroppedSample], trajectories: Sequence[Trajectory], *, source: str
) -> None:
    """Refuse scores of the wrong number or kind, naming the samples.

    Raises:
        RewardError: fewer or more scores than trajectories, a score or component that is not a finite number, or
            a failure of another sample than the one in its place.
    """
    if len(scores) != len(trajectories):
        raise RewardError(
            f"reward {source} returned {len(scores)} scores for {len(trajectories)} trajectories; "
            "return exactly one per trajectory, in order"
        )
    found = [(t.sample_id, _fault(score, t)) for score, t in zip(scores, trajectories, strict=True)]
    if bad := [(sample_id, fault) for sample_id, fault in found if fault]:
        raise RewardError(
            f"reward {source} returned {bad[0][1]} for sample {bad[0][0]!r}"
            + (f" and {len(bad) - 1} more like it" if len(bad) > 1 else "")
            + "; return finite numbers, in the order of the trajectories",
            sample_ids=tuple(sample_id for sample_id, _ in bad),
        )


def _fault(score: Score | DroppedSample, trajectory: Trajectory) -> str:
    """What is wrong with a score; empty if nothing is."""
    if isinstance(score, DroppedSample):
        other = score.sample_id != trajectory.sample_id
        return f"the failure of {score.sample_id!r}" if other else ""
    if not math.isfinite(score.value):
        return f"{score.value}"
    if bad := [name for name, value in score.components.items() if not math.isfinite(value)]:
        return f"{score.components[bad[0]]} as the component {bad[0]!r}"
    if score.rewards and len(score.rewards) != len(trajectory.token_ids):
        return f"{len(score.rewards)} token rewards (it has {len(trajectory.token_ids)} tokens)"
    return "a token reward that is not finite" if not np.isfinite(np.asarray(score.rewards)).all() else ""


def keep_scored(
    trajectories: Sequence[Trajectory], scores: Sequence[Score | DroppedSample]
) -> tuple[list[Trajectory], list[Score], list[DroppedSample]]:
    """Trajectories that have a score, their scores, and the failures of the others."""
    kept = [(t, s) for t, s in zip(trajectories, scores, strict=True) if isinstance(s, Score)]
    failed = [score for score in scores if isinstance(score, DroppedSample)]
    return [trajectory for trajectory, _ in kept], [score for _, score in kept], failed
