"""What weights a vLLM engine holds, and how new ones come in; runs on the engine's thread, between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core import (
    CapabilityError,
    DeadlineExceeded,
    Link,
    StaleWeightsError,
    WeightManifest,
    WeightSyncError,
    check_base,
)

from rlhf_rollout.backends.vllm.caches import drop_caches, keep_running
from rlhf_rollout.backends.vllm.loop import VLLMLoop
from rlhf_rollout.backends.vllm.workers import on_workers

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_RPC_MARGIN_S = 30.0


class EngineWeights:
    """The weights of one engine.

    Args:
        adapters: whether the engine was built with room for them (`adapter_rank`).
        keep_kv_cache: whether running requests keep keys and values of older weights.
    """

    def __init__(self, *, adapters: bool, keep_kv_cache: bool = False) -> None:
        self.version = 0
        """What the next token is sampled with."""
        self._adapters = adapters
        self._keep_kv_cache = keep_kv_cache
        self._base: int | None = 0
        """Version of the model's own weights, an adapter apart; None if they are undefined."""
        self._stale: str | None = None
        self._dropped = False
        self._link: Link | None = None

    def salt(self, version: int | None = None) -> str:
        """Tells cached blocks of this version apart from those of others."""
        return f"weights {self.version if version is None else version}"

    def drop(self) -> None:
        """Note that sleep has dropped the weights."""
        self._base, self._dropped = None, True

    def check_present(self, engine: LLMEngine, loop: VLLMLoop) -> None:
        """Refuse requests while weights that sleep dropped have not come again."""
        if self._dropped:
            loop.refuse(engine, StaleWeightsError("weights were dropped by sleep and not sent since; sync first"))

    def check_usable(self) -> None:
        """Refuse to compute with weights that are not there.

        Raises:
            StaleWeightsError: the last transfer failed, or sleep dropped the weights.
        """
        if self._dropped or self._stale is not None:
            raise StaleWeightsError(self._stale or "weights were dropped by sleep and not sent since; sync first")

    def connect(self, engine: LLMEngine, link: Link, rank: int) -> None:
        """Let all workers join a link.

        Raises:
            DeadlineExceeded: the sender did not accept in time.
            WeightSyncError: the link cannot be joined.
        """
        info = {
            "kind": link.kind,
            "address": link.address,
            "receivers": link.receivers,
            "timeout_s": link.timeout_s,
            "first_rank": rank,
        }
        self._link = None
        # Meeting the store and forming the group are two waits.
        failure = on_workers(engine, "rlhf_connect", info, timeout_s=2 * link.timeout_s + _RPC_MARGIN_S)
        if failure is not None:
            kind, message = failure
            raise (DeadlineExceeded if kind == "DeadlineExceeded" else WeightSyncError)(message)
        self._link = link

    def receive(self, engine: LLMEngine, loop: VLLMLoop, manifest: WeightManifest) -> None:
        """Take weights or an adapter, and drop what was computed with the old ones, unless it is to be kept.

        Raises:
            CapabilityError: the manifest brings an adapter, and the engine was built with adapter_rank 0.
            WeightSyncError: the weights did not arrive or do not fit; the loop then refuses requests.
        """
        if manifest.adapter is not None and not self._adapters:
            raise CapabilityError(
                "this engine was built without room for adapters: give RolloutConfig an adapter_rank of at least "
                f"{manifest.adapter.rank}, or sync merged weights"
            )
        try:
            self._check_base(manifest)
        except WeightSyncError as error:
            self._refuse(engine, loop, str(error))
            raise
        loop.settle(engine)
        failure = self._transfer(engine, manifest)
        try:
            if self._keep_kv_cache and failure is None:
                keep_running(engine, self.salt(manifest.version))
            else:
                # Running requests too: keys and values of the old weights would mix with the new ones.
                drop_caches(engine)
        except Exception as error:
            failure = failure or (type(error).__name__, str(error))
        if failure is not None:
            problem = f"weight version {manifest.version} did not arrive: {failure[0]}: {failure[1]}"
            self._refuse(engine, loop, problem)
            raise WeightSyncError(problem)
        engine.set_weight_version(str(manifest.version))
        self.version = manifest.version
        self._dropped, self._stale = False, None
        loop.accept()

    def _check_base(self, manifest: WeightManifest) -> None:
        if manifest.adapter is None:
            # An adapter was on top of the base: what came since that is no change to anything held here.
            plain = self._base == self.version and self._stale is None
            check_base(manifest, self._base if plain else None)
        elif manifest.base_version != self._base:
            held = "weights that a failed sync or sleep left" if self._base is None else f"version {self._base}"
            raise WeightSyncError(
                f"the adapter of weight version {manifest.version} belongs to weights of version "
                f"{manifest.base_version}, and this engine holds {held}; send all weights, or start it anew"
            )

    def _transfer(self, engine: LLMEngine, manifest: WeightManifest) -> tuple[str, str] | None:
        timeout_s = (self._link.timeout_s if self._link else 0.0) * (len(manifest.buckets()) + 1) + _RPC_MARGIN_S
        data = manifest.to_dict()
        if manifest.adapter is not None:
            return on_workers(engine, "rlhf_receive_adapter", data, timeout_s=timeout_s)
        self._base = None
        failure = on_workers(engine, "rlhf_receive_weights", data, timeout_s=timeout_s)
        if failure is None and self._adapters:
            failure = on_workers(engine, "rlhf_empty_adapter", timeout_s=timeout_s)
        if failure is None:
            self._base = manifest.version
        return failure

    def _refuse(self, engine: LLMEngine, loop: VLLMLoop, problem: str) -> None:
        self._stale = f"{problem}; sampling goes on after the next complete sync"
        loop.refuse(engine, StaleWeightsError(self._stale))
