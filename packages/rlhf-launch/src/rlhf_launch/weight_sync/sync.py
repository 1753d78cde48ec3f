"""New weights from the policy's ranks to every rollout engine: one control call per worker and sync."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core import (
    PARTIAL_SYNCS,
    ConfigError,
    EngineDiedError,
    Link,
    RLHFError,
    UserError,
    WeightManifest,
    WeightSyncError,
    release_sender,
)

from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.workers.handles import gather
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup

_RELEASE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What one sync did."""

    version: int
    bytes: int
    buckets: int
    seconds: float
    """Time from the first control call to the last acknowledgement."""
    partial: bool = False
    """Whether only changes were sent."""
    lost: tuple[str, ...] = ()
    """Engines that were found dead during this sync, with the reason; the others have the weights."""


class WeightSync:
    """Keeps the rollout engines at the policy's version, over a link that is opened again after a failure."""

    def __init__(
        self,
        policy: TrainGroup,
        pool: RolloutPool,
        *,
        transports: Sequence[str],
        timeout_s: float = 900.0,
        options: WeightSyncSection | None = None,
    ) -> None:
        self._policy = policy
        self._pool = pool
        self._options = options or WeightSyncSection()
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._opened: Link | None = None
        """The link that was opened last, from its opening on; `_link` is one that works."""
        self._transports = (self._options.transport,) if self._options.transport else tuple(transports)
        self._shares_memory = True
        """False after a transfer through shared memory failed, perhaps for want of room."""
        self.transport = self._choose_transport()
        """The kind of link that the weights travel by."""
        self.version: int | None = None
        """The version of all live engines; None before the first sync and after a failed one."""
        if PARTIAL_SYNCS.index(self._options.delta) > PARTIAL_SYNCS.index(pool.partial_sync):
            raise ConfigError(
                f"weight sync: delta={self._options.delta!r} needs more than the rollout backend can take "
                f"(partial_sync={pool.partial_sync!r}); choose {pool.partial_sync!r}"
            )
        if self._options.adapters == "adapter" and not pool.adapters:
            raise ConfigError(
                "weight sync: adapters=adapter needs rollout engines that take an adapter alone, which the backend "
                "vllm does and this one does not; write adapters: merged"
            )

    def __call__(self, version: int) -> SyncReport:
        """Bring all engines to `version`. A failed transfer is tried once more, with all weights, over a new link.

        Engines that turn out to be dead are left out (`RolloutPool.lost`), and the others go on.

        Raises:
            EngineDiedError: no engine is left.
            WeightSyncError: both tries failed; the engines refuse to sample until a sync succeeds.
        """
        lost_before = set(self._pool.lost)
        errors: list[str] = []
        while True:
            dead = len(self._pool.lost)
            try:
                report = self._sync(version)
                lost = {engine: why for engine, why in self._pool.lost.items() if engine not in lost_before}
                return replace(report, lost=tuple(f"engine {engine}: {why}" for engine, why in lost.items()))
            except UserError:
                raise
            except RLHFError as error:
                # A link is never reused after a failure: its two ends may be at different buckets.
                self._link, self.version = None, None
                if not self._pool.live:
                    raise EngineDiedError(f"no rollout engine is left to take weights: {error}") from error
                if len(self._pool.lost) > dead:
                    continue  # what failed is out now
                errors.append(str(error))
                self._shares_memory &= self.transport != "shm"
                if len(errors) == 2:
                    raise WeightSyncError(
                        f"weights of version {version} could not be sent: {errors[0]}; over a new link: {errors[1]}"
                    ) from error

    def bring_up(self, engine: int) -> None:
        """Bring one engine, new or restarted, to the version that the others have, and use it again.

        The policy must not have taken a step since that version was sent; after one, sync instead.

        Raises:
            WeightSyncError: there was no sync yet, or the transfer failed.
        """
        if self.version is None:
            raise WeightSyncError("no engine has weights to catch up with; call the sync itself")
        self.transport = self._choose_transport(engine)
        link = self._opened = self._policy.open_link(self.transport, self._pool.receivers_of(engine))
        self._link = None  # the trainer has one link at a time; the next sync opens one to all
        what = f"rollout engine {engine} to be brought to weight version {self.version}"
        self._meet([self._policy.accept_link()], [self._pool.call(engine, "connect", link, 0)], [engine], what)
        manifest = self._options_on(self._complete_manifest(self.version))
        receiving = [self._pool.call(engine, "receive_weights", manifest)]
        self._meet(self._policy.send(manifest), receiving, [engine], what)
        self._pool.admit(engine)

    def _sync(self, version: int) -> SyncReport:
        begin = time.perf_counter()
        if self._link is None:
            self._connect()
        manifest = self._options_on(self._manifest(version))
        # Both sides enter together: the receivers' calls are under way before the senders start.
        receiving = self._pool.receive(manifest)
        self._meet(
            self._policy.send(manifest), receiving, self._pool.live, f"weights of version {version} to arrive"
        )
        if self._options.delta != "none":
            self._policy.confirm(version)
        self.version = version
        return SyncReport(
            version=version,
            bytes=manifest.total_bytes,
            buckets=len(manifest.buckets()),
            seconds=time.perf_counter() - begin,
            partial=manifest.partial,
        )

    def _manifest(self, version: int) -> WeightManifest:
        options = self._options
        if options.delta == "none":
            return self._complete_manifest(version)
        return self._policy.changes(version, bucket_bytes=options.bucket_bytes, mode=options.delta)

    def _complete_manifest(self, version: int) -> WeightManifest:
        """A manifest of everything that an engine needs which has only the weights it was loaded with."""
        options = self._options
        adapters = options.adapters == "adapter"
        return self._policy.manifest(version, bucket_bytes=options.bucket_bytes, adapters=adapters)

    def _options_on(self, manifest: WeightManifest) -> WeightManifest:
        return replace(manifest, checksums=True) if self._options.checksums else manifest

    def _choose_transport(self, *joining: int) -> str:
        """The best kind of link that every engine can join; shared memory only if all share it, `joining` too."""
        kinds = list(self._transports)
        if "shm" in kinds and len(kinds) > 1 and not (self._shares_memory and self._on_one_host(joining)):
            kinds.remove("shm")
        return self._pool.choose_transport(kinds)

    def _on_one_host(self, joining: Sequence[int]) -> bool:
        engines = list(dict.fromkeys([*self._pool.live, *joining]))
        asked = [self._pool.call(engine, "shared_memory") for engine in engines]
        what = "workers to name the memory that they can share"
        found = self._meet([self._policy.shared_memory()], asked, engines, what)
        return None not in found and len(set(found)) == 1

    def _connect(self) -> None:
        self.transport = self._choose_transport()
        link = self._opened = self._policy.open_link(self.transport, self._pool.receivers)
        joining = self._pool.connect(link)
        what = f"all ends of the {link.kind} weight link to meet"
        self._meet([self._policy.accept_link()], joining, self._pool.live, what)
        self._link = link

    def _meet(
        self, sending: Sequence[Future[Any]], receiving: Sequence[Future[Any]], engines: Sequence[int], what: str
    ) -> list[Any]:
        """The results of both sides. After a failure, dead engines are looked for first: they are the cause."""
        try:
            return gather([*receiving, *sending], what=what, timeout_s=self._timeout_s)
        except RLHFError:
            self._release(sending)
            wait(receiving, timeout=self._timeout_s)
            for engine, future in zip(engines, receiving, strict=True):
                if future.done() and isinstance(error := future.exception(), EngineDiedError):
                    self._pool.drop(engine, str(error))
            raise

    def _release(self, sending: Sequence[Future[Any]]) -> None:
        """End the sender, which may be waiting for an engine that is gone; only then can it open a new link."""
        give_up_at = time.monotonic() + self._timeout_s
        while wait(sending, timeout=_RELEASE_S).not_done and time.monotonic() < give_up_at:
            if self._opened is not None:
                with contextlib.suppress(RLHFError):
                    release_sender(self._opened)
