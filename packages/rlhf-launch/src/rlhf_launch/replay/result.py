"""What came of a step that was taken again."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_launch.bundles.bundle import Bundle
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.replay.parting import Parting, first_parted


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What came of a step that was taken again."""

    bundle: Bundle
    config: OnlineConfig
    """The settings that it was taken again with."""
    weights: str
    """What it started from, in words."""
    partings: tuple[Parting, ...]
    """Every quantity of both, in the order in which a step computes them."""
    notes: tuple[str, ...]
    """What could not be compared, and why."""
    tolerance: float
    """A number parts if it differs by more than this times max(1, its absolute value then)."""
    error: str | None = None
    """What the step ended in this time, if it ended in an error then."""

    @property
    def first(self) -> Parting | None:
        """The first quantity that parts; None if none does."""
        return first_parted(self.partings)

    @property
    def equal(self) -> bool:
        """Whether all that was compared has the same bits."""
        return all(parting.equal for parting in self.partings)
