"""What a sync did, as a record and as the message of a run that ends by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core import RLHFError

from rlhf_launch.workers.probe import ProbeReport


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What one sync did."""

    version: int
    bytes: int
    buckets: int
    seconds: float
    """Time from the first control call to the last acknowledgement, the probe included."""
    gathered_bytes: int = 0
    """Bytes of the parameters that the policy's ranks gathered for it, again for each time; 0 where an engine does
    not count them."""
    partial: bool = False
    """Whether only changes were sent."""
    lost: tuple[str, ...] = ()
    """Engines that were found dead during this sync, with the reason; the others have the weights."""
    probes: tuple[ProbeReport, ...] = ()
    """What each engine answered to the probe; empty if this sync was not verified."""
    probe_seconds: float = 0.0
    """Time for the policy's answer to the probe and the slowest engine's."""

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of the sync, for a log."""
        metrics = {"weight_version": float(self.version), "sync/bytes": float(self.bytes)}
        if self.gathered_bytes and self.bytes:
            metrics["sync/gathered_per_sent"] = self.gathered_bytes / self.bytes
        if self.probes:
            metrics["sync/probe_seconds"] = self.probe_seconds
            metrics["sync/probe_gap"] = max(report.gap.mean for report in self.probes)
            metrics["sync/probe_gap_max"] = max(report.gap.largest for report in self.probes)
        return metrics


def finding(version: int, wrong: Sequence[RLHFError], transport: str) -> str:
    """What is said when a load was wrong twice."""
    return (
        f"rollout engines do not compute what the policy computes, with the weights of version {version}, which "
        f"arrived whole. First try: {wrong[0]}. Second try, all weights over a new {transport} link with checksums "
        f"and another way of loading: {wrong[1]}. Nothing was sampled with these weights. `rlhf doctor mismatch "
        "CONFIG` compares the two sides; try rollout.backend: transformers, other rollout.options (without "
        "quantisation, with enforce_eager: true) or another version of the backend. If such a difference is meant "
        "to be, raise weight_sync.probe_limit"
    )
