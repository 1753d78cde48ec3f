"""Which of many engines has the least work, in logarithmic time."""

from __future__ import annotations

import heapq


class LeastLoaded:
    """Loads of `size` engines. A heap whose outdated entries are skipped when they come to the top.

    >>> engines = LeastLoaded(2)
    >>> engines.take(3), engines.take(1), engines.take(1)
    (0, 1, 1)
    """

    def __init__(self, size: int) -> None:
        self._loads = [0] * size
        self._heap = [(0, index) for index in range(size)]

    def take(self, work: int) -> int:
        """The engine with the least load, the first of several; `work` is added to its load."""
        while self._heap[0][0] != self._loads[self._heap[0][1]]:
            heapq.heappop(self._heap)
        index = self._heap[0][1]
        self._loads[index] += work
        heapq.heapreplace(self._heap, (self._loads[index], index))
        return index

    def give_back(self, index: int, work: int) -> None:
        """Take `work` off an engine's load."""
        self._loads[index] -= work
        heapq.heappush(self._heap, (self._loads[index], index))
        if len(self._heap) > 4 * len(self._loads) + 64:
            self._heap = [(load, engine) for engine, load in enumerate(self._loads)]
            heapq.heapify(self._heap)

    def load(self, index: int) -> int:
        """Of one engine."""
        return self._loads[index]
