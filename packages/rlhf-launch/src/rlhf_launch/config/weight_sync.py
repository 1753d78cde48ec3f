"""The `weight_sync` section of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core import DEFAULT_BUCKET_BYTES, PARTIAL_SYNCS, ConfigError, PartialSync


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncSection:
    """How weights are sent."""

    transport: str | None = None
    """Kind of weight transport (see `rlhf_core.weight_sync`); by default the fastest that the placement
    allows."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Sender and receivers each hold two buffers of this size (or of the largest tensor)."""
    checksums: bool = False
    """Receivers compare a checksum of every bucket."""
    adapters: Literal["merged", "adapter"] = "merged"
    """With a policy that trains adapters: `merged` sends all weights with the adapters' updates in them; `adapter`
    sends the adapters alone, megabytes, which rollout engines put on top of the weights they were loaded with."""
    delta: PartialSync = "none"
    """`tensors` or `values`: after the first sync, send only what changed (see rlhf_core.weight_sync.delta)."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"weight sync: bucket_bytes must be at least 1, got {self.bucket_bytes}")
        if self.adapters not in ("merged", "adapter"):
            raise ConfigError(f"weight sync: adapters must be merged or adapter, got {self.adapters!r}")
        if self.adapters == "adapter" and self.delta != "none":
            raise ConfigError(
                f"weight sync: adapters=adapter sends little as it is, and delta={self.delta!r} is for weights; "
                "leave out one of them"
            )
        if self.delta not in PARTIAL_SYNCS:
            raise ConfigError(f"weight sync: delta must be none, tensors or values, got {self.delta!r}")
