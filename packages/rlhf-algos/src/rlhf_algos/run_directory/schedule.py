"""When a checkpoint is due: after so many steps, or so long after the last one."""

from __future__ import annotations

import time
from collections.abc import Callable


class CheckpointSchedule:
    """Counts steps and minutes between checkpoints.

    >>> schedule = CheckpointSchedule(every=4, minutes=0)
    >>> [step for step in range(1, 9) if schedule.due(step)]
    [4, 8]
    """

    def __init__(
        self, *, every: int = 0, minutes: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Due `every` so many steps, and after the first step that ends `minutes` after the last one; 0: never."""
        self._every, self._seconds, self._clock = every, 60 * minutes, clock
        self._saved = clock()

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        return bool(self._every and step % self._every == 0) or self.late

    @property
    def late(self) -> bool:
        """Whether the last checkpoint, or the start, is too long ago."""
        return bool(self._seconds) and self._clock() - self._saved >= self._seconds

    def saved(self) -> None:
        """Note that a checkpoint was begun now."""
        self._saved = self._clock()
