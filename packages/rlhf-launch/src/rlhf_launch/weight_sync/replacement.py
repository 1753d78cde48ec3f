"""New rollout engines in the place of lost ones, with the weights that the others have."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_core import EngineDiedError

from rlhf_launch.placement.executor import Executor
from rlhf_launch.weight_sync.report import SyncReport
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.rollout_pool import RolloutPool

_log = logging.getLogger(__name__)


class RolloutReplacement:
    """Replaces lost engines, a limited number of times in a run.

    A replacement takes the weights of the last sync from the trainer. Whoever asks for one, from any thread, waits
    while the trainer is busy (see `suspended`).
    """

    def __init__(self, executor: Executor, pool: RolloutPool, sync: WeightSync, *, limit: int) -> None:
        self._executor = executor
        self._pool = pool
        self._sync = sync
        self._left = limit
        self._limit = limit
        self._waits = pool.waits
        self._one_at_a_time = pool.waits.clock.lock()

    def __call__(self) -> None:
        """Replace every lost engine.

        Raises:
            EngineDiedError: the run's replacements are used up and no engine is left; names the last reason.
        """
        with self._one_at_a_time:
            for engine, reason in self._pool.lost.items():
                if not self._count(reason):
                    return
                self._start(engine, reason)
                if self._sync.version is None:
                    # Nothing was synced yet: it loaded the weights that the others have.
                    self._sync.check_loaded(engine)
                    self._pool.admit(engine)
                else:
                    self._sync.bring_up(engine)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Replace nothing inside this block: the trainer is busy, or its weights are not those of the last sync."""
        with self._one_at_a_time:
            yield

    def sync(self, version: int) -> SyncReport:
        """Bring all engines to `version`, from inside `suspended`, and replacements if all turn out dead."""
        if self._pool.live:
            try:
                return self._sync(version)
            except EngineDiedError:
                if self._pool.live:
                    raise
        for engine, reason in self._pool.lost.items():
            if not self._count(reason):
                break
            self._start(engine, reason)
            # Requests that wait for an engine must not get the weights that it started with.
            self._pool.admit(engine, paused=True)
        report = self._sync(version)
        self._pool.resume()
        return report

    def stop(self) -> None:
        """Replace nothing from now on: the run is over, and whoever still waits for an engine gets an error."""
        self._left = 0

    def _count(self, reason: str) -> bool:
        """Whether one more replacement is allowed.

        Raises:
            EngineDiedError: it is not, and no engine is left.
        """
        if self._left == 0:
            if not self._pool.live:
                raise EngineDiedError(
                    f"no rollout engine is left after {self._limit} replacements (placement.engine_restarts); the "
                    f"last was lost because: {reason}"
                )
            return False
        self._left -= 1
        return True

    def _start(self, engine: int, reason: str) -> None:
        _log.warning("rollout engine %d is lost (%s); starting another", engine, reason)
        self._pool.retire(engine)
        handle = self._executor.restart(self._pool.handle_of(engine).name)
        what = f"the replacement of rollout engine {engine} to start"
        self._waits.gather([handle.call("start")], what=what, workers=[handle])
        self._pool.replace(engine, handle)
