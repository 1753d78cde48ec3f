"""New rollout engines in the place of lost ones, with the weights that the others have."""

from __future__ import annotations

import logging
import threading

from rlhf_core import EngineDiedError

from rlhf_launch.handles import gather
from rlhf_launch.placement import Executor
from rlhf_launch.rollout_pool import RolloutPool
from rlhf_launch.weight_sync import WeightSync

_log = logging.getLogger(__name__)


class EngineReplacement:
    """Replaces lost engines, a limited number of times in a run.

    Called while the trainer rests: a replacement takes the weights of the last sync from it.
    """

    def __init__(
        self, executor: Executor, pool: RolloutPool, sync: WeightSync, *, limit: int, timeout_s: float
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._sync = sync
        self._left = limit
        self._limit = limit
        self._timeout_s = timeout_s
        self._one_at_a_time = threading.Lock()

    def __call__(self) -> None:
        """Replace every lost engine.

        Raises:
            EngineDiedError: the run's replacements are used up and no engine is left; names the last reason.
        """
        with self._one_at_a_time:
            for engine, reason in self._pool.lost.items():
                if self._left == 0:
                    if not self._pool.live:
                        raise EngineDiedError(
                            f"no rollout engine is left after {self._limit} replacements "
                            f"(placement.max_restarts); the last was lost because: {reason}"
                        )
                    return
                self._left -= 1
                self._replace(engine, reason)

    def _replace(self, engine: int, reason: str) -> None:
        _log.warning("rollout engine %d is lost (%s); starting another", engine, reason)
        self._pool.retire(engine)
        handle = self._executor.restart(self._pool.name_of(engine))
        what = f"the replacement of rollout engine {engine} to start"
        gather([handle.call("start")], what=what, timeout_s=self._timeout_s)
        self._pool.replace(engine, handle)
        if self._sync.version is None:
            self._pool.admit(engine)  # nothing was synced yet: it loaded the very weights the others have
        else:
            self._sync.bring_up(engine)
