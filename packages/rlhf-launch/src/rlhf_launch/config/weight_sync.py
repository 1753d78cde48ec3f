"""The `weight_sync` section of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core import (
    DEFAULT_BUCKET_BYTES,
    PARTIAL_SYNCS,
    ConfigError,
    PartialSync,
    check_number,
    check_switch,
    check_whole,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncSection:
    """How weights are sent."""

    transport: str | None = None
    """Kind of weight transport (see `rlhf_core.weight_sync`); by default the fastest that the placement
    allows."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Sender and receivers each hold two buffers of this size, whatever the model: larger tensors travel in parts.
    With NCCL the receivers' are on the GPUs, and vLLM leaves room for them."""
    checksums: bool = False
    """Receivers compare a checksum of every bucket."""
    adapters: Literal["merged", "adapter"] = "merged"
    """With a policy that trains adapters: `merged` sends all weights with the adapters' updates in them; `adapter`
    sends the adapters alone, megabytes, which rollout engines put on top of the weights they were loaded with."""
    delta: PartialSync = "none"
    """`tensors` or `values`: after the first sync, send only what changed (see rlhf_core.weight_sync.delta)."""
    keep_kv_cache: bool = False
    """Samples that run on across a sync (`rollout.overlap`) keep the keys and values that older weights made, in
    place of computing them again under the new ones. Their log-probs are those of the distribution that each token
    was drawn from, which is no version's own; what the trainer finds otherwise is in `mismatch/`."""
    probe_every: int = 1
    """After every so many syncs, and when an engine joins, the rollout engines score a few fixed tokens, and their
    log-probs must be the policy's up to rounding; nothing is sampled with weights that were found wrong. 0 never
    does it."""
    probe_tokens: int = 64
    """How many tokens they score, at least; more with many experts, so that most are reached."""
    probe_limit: float | None = None
    """The largest difference in nats, on average and at the median, that is taken for rounding; by default it
    follows from the numbers in which both sides compute, and from the first probes (docs/numbers.md)."""

    def __post_init__(self) -> None:
        check_switch("weight sync: keep_kv_cache", self.keep_kv_cache)
        check_whole("weight sync: probe_every", self.probe_every, at_least=0)
        check_whole("weight sync: probe_tokens", self.probe_tokens, at_least=2)
        if self.probe_limit is not None:
            check_number("weight sync: probe_limit", self.probe_limit, above=0)
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
