"""Which of many engines has the least work, in logarithmic time."""

from __future__ import annotations

import heapq
import threading

from rlhf_core import EngineDiedError


class LeastLoaded:
    """Loads of `size` engines. A heap whose outdated entries are skipped when they come to the top.

    Training stream, evaluations and replacements use it from threads of their own.

    >>> engines = LeastLoaded(2)
    >>> engines.take(3), engines.take(1), engines.take(1)
    (0, 1, 1)
    """

    def __init__(self, size: int) -> None:
        self._loads = [0] * size
        self._lock = threading.Lock()
        self._out: set[int] = set()
        self._heap = [(0, index) for index in range(size)]

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
            index = self._heap[0][1]
            self._loads[index] += work
            heapq.heapreplace(self._heap, (self._loads[index], index))
            return index

    def give_back(self, index: int, work: int) -> None:
        """Take `work` off an engine's load."""
        with self._lock:
            self._loads[index] -= work
            heapq.heappush(self._heap, (self._loads[index], index))
            if len(self._heap) > 4 * len(self._loads) + 64:
                self._heap = [(load, engine) for engine, load in enumerate(self._loads) if engine not in self._out]
                heapq.heapify(self._heap)

    def leave_out(self, index: int) -> None:
        """Give an engine no more work."""
        self._out.add(index)

    def admit(self, index: int) -> None:
        """Give an engine work again."""
        with self._lock:
            self._out.discard(index)
            heapq.heappush(self._heap, (self._loads[index], index))

    def _outdated(self, load: int, index: int) -> bool:
        return index in self._out or load != self._loads[index]

    def load(self, index: int) -> int:
        """Of one engine."""
        return self._loads[index]
