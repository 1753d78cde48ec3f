"""What every kind of reward has in a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_rollout.rewards.faults import FailureHandling


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """What every kind has. Not a part by itself."""

    # Without slots of its own, it can stand beside a slotted configuration as a second base class.
    __slots__ = ()

    weight: float = 1.0
    """Factor of its score in the sum; 0 only logs it."""
    on_failure: FailureHandling | None = None
    """What happens when it fails; that of the whole reward if not given."""
