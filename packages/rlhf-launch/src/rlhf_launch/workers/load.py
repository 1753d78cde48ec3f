"""The load of engines: which of many has the least work, and how long engines had none."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rlhf_core import EngineDiedError


class EngineLoads:
    """The samples under way at each of `size` engines.

    The engine with the least work is found in logarithmic time, by a heap whose outdated entries are skipped when
    they come to the top. Training stream, evaluations and replacements use it from threads of their own.

    >>> loads = EngineLoads(2)
    >>> loads.take(3), loads.take(1), loads.take(1)
    (0, 1, 1)
    """

    def __init__(self, size: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loads = [0] * size
        self._lock = threading.Lock()
        self._out: set[int] = set()
        self._heap = [(0, engine) for engine in range(size)]
        self._clock = clock
        self._paused = False
        self._workless = size
        self._idle, self._since = 0.0, clock()

    def take(self, work: int) -> int:
        """The engine with the least load, the first of several; `work` is added to its load.

        Raises:
            EngineDiedError: all engines are left out.
        """
        with self._lock:
            while self._heap and self._outdated(*self._heap[0]):
                heapq.heappop(self._heap)
            if not self._heap:
                raise EngineDiedError("no rollout engine is left")
            engine = self._heap[0][1]
            self._add(engine, work)
            heapq.heapreplace(self._heap, (self._loads[engine], engine))
            return engine

    def give_back(self, engine: int, work: int) -> None:
        """Take `work` off an engine's load."""
        with self._lock:
            self._add(engine, -work)
            heapq.heappush(self._heap, (self._loads[engine], engine))
            if len(self._heap) > 4 * len(self._loads) + 64:
                self._heap = [(load, number) for number, load in enumerate(self._loads) if number not in self._out]
                heapq.heapify(self._heap)

    def leave_out(self, engine: int) -> None:
        """Give an engine no more work."""
        self._out.add(engine)

    def admit(self, engine: int) -> None:
        """Give an engine work again."""
        with self._lock:
            self._out.discard(engine)
            heapq.heappush(self._heap, (self._loads[engine], engine))

    def load(self, engine: int) -> int:
        """The load of one engine."""
        return self._loads[engine]

    def pause(self, paused: bool) -> None:
        """Note that all engines stand still from now on, or no longer."""
        with self._lock:
            self._count()
            self._paused = paused

    def take_idle_seconds(self) -> float:
        """Seconds since the last call in which an engine had no work or stood still: the mean over engines."""
        with self._lock:
            self._count()
            idle, self._idle = self._idle, 0.0
            return idle / len(self._loads)

    def _outdated(self, load: int, engine: int) -> bool:
        return engine in self._out or load != self._loads[engine]

    def _add(self, engine: int, work: int) -> None:
        self._count()
        before = self._loads[engine]
        self._loads[engine] += work
        self._workless += (self._loads[engine] == 0) - (before == 0)

    def _count(self) -> None:
        """Add up the idle time until now."""
        now = self._clock()
        self._idle += (len(self._loads) if self._paused else self._workless) * (now - self._since)
        self._since = now


class IdleTime:
    """How long the ranks of a role had nothing to do: none of them had a call under way.

    Calls end on threads of their own; any thread may ask.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._idle, self._since = 0.0, clock()

    def begin(self, calls: Sequence[Future[Any]]) -> None:
        """Note that these calls are under way until they end, however they do."""
        with self._lock:
            self._count()
            self._under_way += len(calls)
        for call in calls:
            call.add_done_callback(self._end)

    def take_idle_seconds(self) -> float:
        """Seconds since the last call in which nothing was under way."""
        with self._lock:
            self._count()
            idle, self._idle = self._idle, 0.0
            return idle

    def _end(self, call: Future[Any]) -> None:
        with self._lock:
            self._count()
            self._under_way -= 1

    def _count(self) -> None:
        """Add up the idle time until now."""
        now = self._clock()
        self._idle += (now - self._since) * (not self._under_way)
        self._since = now
