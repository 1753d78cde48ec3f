"""Time in which rollout engines had nothing to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class IdleTime:
    """Adds up, over all engines, the time in which an engine had no request, or was held.

    Whoever sends requests reports them; it may do so from several threads.
    """

    def __init__(self, engines: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests = [0] * engines
        self._held = False
        self._idle, self._since = 0.0, clock()

    def begins(self, engine: int) -> None:
        """A request went to an engine."""
        self._change(engine, 1)

    def ends(self, engine: int) -> None:
        """A request came back."""
        self._change(engine, -1)

    def hold(self, held: bool) -> None:
        """From now on all engines stand still, or no longer."""
        with self._lock:
            self._count()
            self._held = held

    def take(self) -> float:
        """Idle seconds of an engine, on average, since the last call."""
        with self._lock:
            self._count()
            idle, self._idle = self._idle, 0.0
            return idle / len(self._requests)

    def _change(self, engine: int, by: int) -> None:
        with self._lock:
            self._count()
            self._requests[engine] += by

    def _count(self) -> None:
        now = self._clock()
        idle = len(self._requests) if self._held else self._requests.count(0)
        self._idle += idle * (now - self._since)
        self._since = now
