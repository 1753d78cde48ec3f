"""New rollout engines in the place of lost ones, with the weights that the others have."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_core import ConfigError, DeadlineExceeded, EngineDiedError, ResourceError, WeightSyncError

from rlhf_launch.placement.executor import Executor
from rlhf_launch.weight_sync.report import SyncReport
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.weight_sync.verification import ProbeFailed
from rlhf_launch.workers.devices import ROLLOUT
from rlhf_launch.workers.handles import Handle, close_workers
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.waits import WorkerLostError

_log = logging.getLogger(__name__)

_GRACE_S = 1.0
"""How long a step waits for replacements while other engines are at work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Starting:
    """A replacement that is coming up."""

    handle: Handle
    started: Future[Any]
    since: float


class RolloutReplacement:
    """Replaces lost engines, a limited number of times in a run.

    A replacement comes up beside the run and is used from the first step on that finds it up, with the weights of
    the last sync; on devices that training engines share, it comes up before these need them. One that cannot start
    costs the run no more than itself: the others go on, and the next step tries again while replacements are left.
    Only without any engine does somebody wait for one. Whoever asks for one, from any thread, waits while the
    trainer is busy (see `suspended`).
    """

    def __init__(self, executor: Executor, pool: RolloutPool, sync: WeightSync, *, limit: int) -> None:
        self._executor = executor
        self._pool = pool
        self._sync = sync
        self._left = limit
        self._limit = limit
        self._waits = pool.waits
        self._one_at_a_time = pool.waits.clock.lock()
        self._starting: dict[int, _Starting] = {}

    def __call__(self) -> None:
        """Start replacements of all lost engines, and use those that are up; wait for one if no engine is left.

        Raises:
            EngineDiedError: the run's replacements are used up and no engine is left; names the first reason.
            WorkerLostError: the cluster is gone.
        """
        with self._one_at_a_time:
            self._begin()
            for engine in self._up():
                try:
                    self._bring_up(engine)
                except WorkerLostError:
                    raise
                except (EngineDiedError, DeadlineExceeded, WeightSyncError) as error:
                    if _holds_wrong_weights(error):
                        raise
                    self._failed(engine, self._pool.handle_of(engine), error)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Use no replacement in this block: the trainer is busy, or its weights are not those of the last sync."""
        with self._one_at_a_time:
            yield

    def sync(self, version: int) -> SyncReport:
        """Bring all engines to `version`, from inside `suspended`, and replacements if all turn out dead."""
        replaced = False
        while True:
            if self._pool.live:
                try:
                    report = self._sync(version)
                    break
                except WorkerLostError:
                    raise
                except EngineDiedError:  # of the last one; replacements may die in turn
                    if self._pool.live:
                        raise
            replaced = True
            self._begin()
            for engine in self._up():
                try:
                    # Requests that wait for an engine must not get the weights that it started with.
                    self._pool.admit(engine, paused=True)
                except WorkerLostError:
                    raise
                except (EngineDiedError, DeadlineExceeded) as error:
                    self._failed(engine, self._pool.handle_of(engine), error)
        if replaced:
            self._pool.resume()
        return report

    def stop(self) -> None:
        """Replace nothing from now on: the run is over, and whoever still waits for an engine gets an error."""
        self._left = 0
        starting, self._starting = self._starting, {}
        close_workers([replacement.handle for replacement in starting.values()], timeout_s=0)

    def _begin(self) -> None:
        """Let replacements come up for all lost engines that have none yet.

        Raises:
            EngineDiedError: there is no engine, and none may or can be started.
        """
        no_room: Exception | None = None
        for engine, reason in self._pool.lost.items():
            if engine in self._starting:
                continue
            if self._left == 0:
                if not self._pool.live and not self._starting:
                    raise EngineDiedError(
                        f"no rollout engine is left after {self._limit} replacements (placement.engine_restarts); "
                        f"engine {engine} was lost because: {reason}"
                    )
                return
            self._left -= 1
            try:
                self._start(engine, reason)
            except (ResourceError, ConfigError) as error:  # its host is lost, too
                _log.warning("there is no room for a replacement of rollout engine %d: %s", engine, error)
                no_room = error
        if no_room is not None and not self._pool.live and not self._starting:
            lost = "; ".join(self._pool.lost.values())
            raise EngineDiedError(
                f"no rollout engine is left, and there is no room for another: {no_room}. They were lost because: "
                f"{lost}"
            ) from no_room

    def _start(self, engine: int, reason: str) -> None:
        _log.warning("rollout engine %d is lost (%s); starting another", engine, reason)
        self._pool.retire(engine)
        handle = self._executor.restart(self._pool.handle_of(engine).name)
        since = self._waits.clock.now()
        self._starting[engine] = _Starting(handle=handle, started=handle.call("start"), since=since)

    def _up(self) -> list[int]:
        """Engines whose replacements have come up, in the pool and without weights; waits for one if none lives."""
        if self._pool.live:
            patience_s = self._waits.limit_s if self._pool.devices.neighbours(ROLLOUT) else _GRACE_S
            starting = [replacement.started for replacement in self._starting.values()]
            self._waits.settle(starting, at_most_s=patience_s)
        else:
            self._await_first()
        up = []
        for engine, replacement in list(self._starting.items()):
            if not replacement.started.done() and not self._too_late(replacement):
                continue
            del self._starting[engine]
            try:
                if not replacement.started.done():
                    raise DeadlineExceeded(
                        f"{replacement.handle.name} did not come up in {self._waits.limit_s:g} s"
                    )
                replacement.started.result()
                self._pool.replace(engine, replacement.handle)
                up.append(engine)
            except WorkerLostError:
                raise
            except Exception as error:  # whatever keeps it from starting, the others go on
                self._failed(engine, replacement.handle, error)
        return up

    def _await_first(self) -> None:
        """Wait until the replacement that was begun first has come up, or will not.

        Raises:
            WorkerLostError: meanwhile the run has lost what it cannot go on without.
        """
        for engine, replacement in self._starting.items():
            what = f"the replacement of rollout engine {engine} to start"
            try:
                self._waits.gather([replacement.started], what=what, workers=[replacement.handle])
            except WorkerLostError:
                raise
            except Exception:
                _log.debug("%s: it did not", what, exc_info=True)
            return

    def _too_late(self, replacement: _Starting) -> bool:
        return self._waits.clock.now() - replacement.since >= self._waits.limit_s

    def _bring_up(self, engine: int) -> None:
        if self._sync.version is None:
            # Nothing was synced yet: it loaded the weights that the others have.
            self._sync.check_loaded(engine)
            self._pool.admit(engine)
        else:
            self._sync.bring_up(engine)

    def _failed(self, engine: int, handle: Handle, error: BaseException) -> None:
        """Go on without a replacement that did not come up; the engine stays lost for its first reason."""
        _log.warning(
            "the replacement of rollout engine %d could not start (%s); %d engine(s) at work, %d replacement(s) "
            "left",
            engine,
            *(error, len(self._pool.live), self._left),
        )
        close_workers([handle])


def _holds_wrong_weights(error: BaseException) -> bool:
    """Whether weights have arrived and are wrong: that ends the run, unlike a replacement that is out of reach."""
    return isinstance(error, ProbeFailed) or isinstance(error.__cause__, ProbeFailed)
