"""New weights from the policy's ranks to every rollout engine: one control call per worker and sync."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
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
    shared_link,
)

from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.weight_sync.report import SyncReport, finding
from rlhf_launch.weight_sync.verification import AS_LOADED, ProbeFailed, SyncVerification
from rlhf_launch.workers.devices import ROLLOUT, in_turn
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.waits import WorkerLostError

_log = logging.getLogger(__name__)

ON_ONE_DEVICE = frozenset({"ipc"})
"""Kinds of link with both ends on one device: each rank of the policy serves the receivers on its own."""
_RELEASE_S = 0.5
_SETTLE_S = 60.0
"""How long both sides of a failed transfer have to end, after which the next try finds out about them."""

_in_turn = in_turn(lambda sync: sync._pool.devices.at_work("policy", ROLLOUT))


class WeightSync:
    """Keeps the rollout engines at the policy's version, over a link that is opened again after a failure."""

    def __init__(
        self,
        policy: TrainGroup,
        pool: RolloutPool,
        *,
        transports: Sequence[str],
        options: WeightSyncSection | None = None,
    ) -> None:
        self._policy = policy
        self._pool = pool
        self._options = options or WeightSyncSection()
        self._waits = pool.waits
        self._link: Link | None = None
        self._opened: Link | None = None
        """The link that was opened last, from its opening on; `_link` is one that works."""
        self._linked: list[int] = []
        """The engines that `_link` leads to."""
        self._transports = (self._options.transport,) if self._options.transport else tuple(transports)
        self._shares_memory = True
        """False after a transfer through shared memory failed, perhaps for want of room."""
        self._other_way = False
        """Whether the next load is the second try of one that was found wrong."""
        self._adapters = self._options.adapters == "adapter"
        self._verification = SyncVerification(policy, pool, self._options)
        self.transport = self._choose_transport()
        """The kind of link that the weights travel by."""
        self.version: int | None = None
        """The version of all live engines; None before the first sync and after a failed one."""
        if PARTIAL_SYNCS.index(self._options.delta) > PARTIAL_SYNCS.index(pool.partial_sync):
            raise ConfigError(
                f"weight sync: delta={self._options.delta!r} needs more than the rollout backend can take "
                f"(partial_sync={pool.partial_sync!r}); choose {pool.partial_sync!r}"
            )
        if self._options.keep_kv_cache and not pool.keeps_kv_cache:
            raise ConfigError(
                "weight sync: keep_kv_cache=true needs rollout engines that keep the states of running requests, "
                "which the backend vllm does and this one does not; leave it out"
            )
        if self._adapters and not pool.adapters:
            raise ConfigError(
                "weight sync: adapters=adapter needs rollout engines that take an adapter alone, which the backend "
                "vllm does and this one does not; write adapters: merged"
            )

    @_in_turn
    def __call__(self, version: int) -> SyncReport:
        """Bring all engines to `version`, and have them verify it by a probe.

        A failed transfer is tried once more, with all weights, over a new link. So is a load that fails its probe,
        by another way of loading as well (see `_try_another_way`). Engines that turn out to be dead are left out
        (`RolloutPool.lost`), and the others go on.

        Raises:
            EngineDiedError: no engine is left.
            WorkerLostError: a rank of the policy is gone, after which nothing is tried again.
            WeightSyncError: both tries failed; the engines refuse to sample until a sync succeeds.
        """
        lost_before = set(self._pool.lost)
        errors: list[RLHFError] = []
        try:
            while True:
                dead = len(self._pool.lost)
                try:
                    report = self._sync(version)
                    lost = {engine: why for engine, why in self._pool.lost.items() if engine not in lost_before}
                    return replace(report, lost=tuple(f"engine {engine}: {why}" for engine, why in lost.items()))
                except (UserError, WorkerLostError):
                    raise
                except RLHFError as error:
                    # A link is never reused after a failure: its two ends may be at different buckets.
                    self._link, self.version = None, None
                    if not self._pool.live:
                        raise EngineDiedError(f"no rollout engine is left to take weights: {error}") from error
                    if len(self._pool.lost) > dead:
                        continue  # what failed is out now
                    errors.append(error)
                    self._after_failure(version, errors)
        finally:
            self._other_way = False

    @_in_turn
    def prove(self) -> str:
        """Have all engines verify the weights that they were loaded with; says what was found.

        Engines that do not agree with the policy get its weights as version 0.

        Raises:
            WeightSyncError: they do not agree after that either.
        """
        if not self._options.probe_every:
            return "weight syncs are not verified: weight_sync.probe_every is 0"
        if not self._verification.active:
            return (
                "weight syncs are not verified: the rollout backend cannot score given tokens (see "
                "rlhf_core.ScoresTokens), so weights that it loads wrongly show in mismatch/log_prob_max at best"
            )
        check = self._verification.check(AS_LOADED)
        what = f"{len(self._pool.live)} rollout engine(s) to score the tokens of a probe"
        calls = [self._pool.call(engine, "probe", check) for engine in self._pool.live]
        reports = list(zip(self._pool.live, self._answers(calls, self._pool.live, what), strict=True))
        try:
            self._verification.accept(AS_LOADED, check, reports)
        except ProbeFailed as error:
            _log.warning("as loaded, engines do not compute what the policy does (%s); syncing them", error)
            self(0)
            return "the rollout engines were loaded with other weights than the policy's, and took its weights"
        worst = max((report.gap for _, report in reports), key=lambda gap: gap.mean)
        return f"weight syncs are verified by a probe; as loaded, engines and policy differ by {worst}"

    @_in_turn
    def check_loaded(self, engine: int) -> None:
        """Verify an engine that was started before the first sync, with the weights that all were loaded with.

        Raises:
            ProbeFailed: it does not compute what the policy does.
        """
        if not self._verification.active:
            return
        check = self._verification.check(AS_LOADED)
        what = f"rollout engine {engine} to score the tokens of a probe"
        call = self._pool.call(engine, "probe", check)
        (report,) = self._answers([call], [engine], what)
        self._verification.accept(AS_LOADED, check, [(engine, report)])

    @_in_turn
    def bring_up(self, engine: int) -> None:
        """Bring one engine, new or restarted, to the version that the others have, and use it again.

        The policy must not have taken a step since that version was sent; after one, sync instead.

        Raises:
            WeightSyncError: there was no sync yet, the transfer failed, or the engine fails its probe twice.
        """
        if self.version is None:
            raise WeightSyncError("no engine has weights to catch up with; call the sync itself")
        errors: list[RLHFError] = []
        try:
            while True:
                try:
                    self._bring_up(engine, self.version)
                    break
                except ProbeFailed as error:
                    errors.append(error)
                    self._after_failure(self.version, errors)
        finally:
            self._other_way = False
        self._pool.admit(engine)

    def _bring_up(self, engine: int, version: int) -> None:
        check = self._verification.check(version) if self._verification.active else None
        self.transport = self._choose_transport(engine)
        link, senders = self._open([engine])
        self._link = None  # the trainer has one link at a time; the next sync opens one to all
        what = f"rollout engine {engine} to be brought to weight version {version}"
        joining = [self._pool.call(engine, "connect", link, 0)]
        self._meet(self._policy.accept_link(senders), joining, [engine], what)
        manifest = self._options_on(self._complete_manifest(version))
        receiving = [self._pool.call(engine, "receive_weights", manifest, check)]
        load, *_ = self._meet(self._policy.send(manifest), receiving, [engine], what)
        if check is not None:
            self._verification.accept(version, check, [(engine, load.probe)])

    def _sync(self, version: int) -> SyncReport:
        begin = time.perf_counter()
        # The policy answers first, so that engines can judge for themselves whether they may go on.
        check = self._verification.check(version) if self._other_way or self._verification.due() else None
        answered = time.perf_counter()
        if self._link is None or self._linked != self._pool.live:
            self._connect()
        # Those of the link, whoever is lost from now on: it carries weights to all of them or to none.
        engines = self._linked
        manifest = self._options_on(self._manifest(version))
        # Both sides enter together: the receivers' calls are under way before the senders start.
        receiving = self._pool.receive(engines, manifest, check)
        what = f"weights of version {version} to arrive"
        results = self._meet(self._policy.send(manifest), receiving, engines, what)
        loads, sent = results[: len(engines)], results[len(engines)]
        probes = tuple(load.probe for load in loads if load.probe is not None)
        self._verification.accept(version, check, zip(engines, probes, strict=False))
        if self._options.delta != "none":
            self._policy.confirm(version)
        self.version = version
        slowest = max((report.seconds for report in probes), default=0.0)
        return SyncReport(
            version=version,
            bytes=manifest.total_bytes,
            buckets=len(manifest.buckets()),
            seconds=time.perf_counter() - begin,
            gathered_bytes=sent.gathered_bytes,
            partial=manifest.partial,
            probes=probes,
            probe_seconds=answered - begin + slowest if probes else 0.0,
        )

    def _after_failure(self, version: int, errors: Sequence[RLHFError]) -> None:
        """Prepare the second try.

        Raises:
            WeightSyncError: that was the second failure of its kind.
        """
        wrong = [error for error in errors if isinstance(error, ProbeFailed)]
        failed = [error for error in errors if not isinstance(error, ProbeFailed)]
        if len(wrong) == 2:
            raise WeightSyncError(finding(version, wrong, self.transport)) from wrong[1]
        if len(failed) == 2:
            raise WeightSyncError(
                f"weights of version {version} could not be sent: {failed[0]}; over a new link: {failed[1]}"
            ) from failed[1]
        self._shares_memory &= self.transport != "shm"
        if errors[-1] in wrong:
            self._try_another_way(version, errors[-1])

    def _try_another_way(self, version: int, error: RLHFError) -> None:
        """Let the next load differ from the last one in all that can differ.

        All weights travel in place of changes or adapters, over a new link, by files where all sides share a disk,
        with checksums; and the backend takes another of its ways of loading (`WeightManifest.other_way`).
        """
        _log.warning(
            "weight version %d is wrong as it was loaded (%s); loading all weights once more, another way",
            version,
            error,
        )
        self._other_way = True
        if self._adapters:
            self._adapters = False
            _log.warning("from now on all weights travel, with the adapters merged into them")

    def _manifest(self, version: int) -> WeightManifest:
        options = self._options
        if options.delta == "none":
            return self._complete_manifest(version)
        return self._policy.changes(version, bucket_bytes=options.bucket_bytes, mode=options.delta)

    def _complete_manifest(self, version: int) -> WeightManifest:
        """A manifest of everything that an engine needs which has only the weights it was loaded with."""
        return self._policy.manifest(version, bucket_bytes=self._options.bucket_bytes, adapters=self._adapters)

    def _options_on(self, manifest: WeightManifest) -> WeightManifest:
        if self._other_way:
            return replace(manifest, checksums=True, other_way=True)
        return replace(manifest, checksums=True) if self._options.checksums else manifest

    def _choose_transport(self, *joining: int) -> str:
        """The best kind of link that every engine can join; shared memory only if all share it, `joining` too."""
        kinds = list(self._transports)
        needs_host = self._other_way or ("shm" in kinds and len(kinds) > 1 and self._shares_memory)
        on_one_host = needs_host and self._on_one_host(joining)
        if self._other_way and on_one_host and not self._options.transport:
            kinds.insert(0, "disk")
        if "shm" in kinds and len(kinds) > 1 and not (self._shares_memory and on_one_host):
            kinds.remove("shm")
        if len(kinds) > 1 and not ON_ONE_DEVICE.isdisjoint(kinds):
            kinds = self._by_devices(kinds, list(dict.fromkeys([*self._pool.live, *joining])))
        return self._pool.choose_transport(kinds)

    def _by_devices(self, kinds: Sequence[str], engines: Sequence[int]) -> list[str]:
        """The kinds that the devices of both sides allow; NCCL takes no two processes on one device."""
        ranks = self._policy.devices_of_ranks()
        devices = [device for engine in engines for device in self._pool.devices_of(engine)]
        unfit = set() if set(devices) <= set(ranks) - {None} else set(ON_ONE_DEVICE)
        if ranks[0] in devices:
            unfit.add("nccl")
        return [kind for kind in kinds if kind not in unfit]

    def _on_one_host(self, joining: Sequence[int]) -> bool:
        engines = list(dict.fromkeys([*self._pool.live, *joining]))
        asked = [self._pool.call(engine, "shared_memory") for engine in engines]
        what = "workers to name the memory that they can share"
        found = self._meet([self._policy.shared_memory()], asked, engines, what)
        return None not in found and len(set(found)) == 1

    def _connect(self) -> None:
        engines = self._pool.live
        self.transport = self._choose_transport()
        link, senders = self._open(engines)
        joining = self._pool.connect(engines, link)
        what = f"all ends of the {link.kind} weight link to meet"
        self._meet(self._policy.accept_link(senders), joining, engines, what)
        self._link, self._linked = link, engines

    def _open(self, engines: Sequence[int]) -> tuple[Link, list[int]]:
        """Open a link to engines; returns it with the policy's ranks that send."""
        if self.transport not in ON_ONE_DEVICE:
            receivers = sum(self._pool.receivers_of(engine) for engine in engines)
            link = self._opened = self._policy.open_link(self.transport, receivers)
            return link, [0]
        senders = self._senders(engines)
        links = self._policy.open_links(self.transport, Counter(senders))
        link = self._opened = shared_link([links[rank] for rank in senders])
        return link, list(links)

    def _senders(self, engines: Sequence[int]) -> list[int]:
        """For each receiver of these engines, the rank of the policy that is on its device.

        Raises:
            ConfigError: there is none on some.
        """
        ranks = {device: rank for rank, device in enumerate(self._policy.devices_of_ranks())}
        senders = []
        for engine in engines:
            devices = self._pool.devices_of(engine)
            if missing := [device for device in devices if device is None or device not in ranks]:
                raise ConfigError(
                    f"weights can travel by {self.transport} where each rollout engine is on the devices of the "
                    f"policy's ranks ({', '.join(map(str, ranks))}); engine {engine} is on {missing[0]}. Let them "
                    "share devices, or choose another weight_sync.transport"
                )
            senders += [ranks[device] for device in devices]
        return senders

    def _meet(
        self, sending: Sequence[Future[Any]], receiving: Sequence[Future[Any]], engines: Sequence[int], what: str
    ) -> list[Any]:
        """The results of both sides. After a failure, the dead are looked for first: they are the cause."""
        workers = [*map(self._pool.handle_of, engines), *self._policy.handles[: len(sending)]]
        try:
            return self._waits.gather([*receiving, *sending], what=what, workers=workers)
        except WorkerLostError:
            raise
        except RLHFError:
            if lost := _died(sending):
                # Its peers wait for it in vain, and so do the engines; the run ends them all.
                raise WorkerLostError(str(lost)) from lost
            self._release(sending)
            self._waits.settle(receiving, at_most_s=_SETTLE_S)
            for engine, future in zip(engines, receiving, strict=True):
                if not future.done():
                    self._pool.end(engine, f"it stands still where it should take part in: {what}")
                elif isinstance(error := future.exception(), EngineDiedError):
                    self._pool.drop(engine, str(error))
            raise

    def _answers(self, calls: Sequence[Future[Any]], engines: Sequence[int], what: str) -> list[Any]:
        return self._waits.gather(calls, what=what, workers=[self._pool.handle_of(engine) for engine in engines])

    def _release(self, sending: Sequence[Future[Any]]) -> None:
        """End the sender, which may be waiting for an engine that is gone; only then can it open a new link."""
        give_up_at = self._waits.clock.now() + _SETTLE_S
        while self._waits.clock.now() < give_up_at:
            self._waits.settle(sending, at_most_s=_RELEASE_S)
            if all(call.done() for call in sending):
                return
            if self._opened is not None:
                with contextlib.suppress(RLHFError):
                    release_sender(self._opened)


def _died(calls: Sequence[Future[Any]]) -> EngineDiedError | None:
    """What the first worker that is gone died of; None if none is."""
    failures = [call.exception() for call in calls if call.done()]
    return next((error for error in failures if isinstance(error, EngineDiedError)), None)
