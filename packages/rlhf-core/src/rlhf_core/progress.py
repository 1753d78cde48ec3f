"""What a process has got done, so that whoever waits for it can tell long work from a standstill.

Whatever runs for long notes what has moved: tokens sampled, rows trained on, bytes sent. The notes are those of the
whole process; nobody reads their amounts, only whether they grow.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def note_progress(what: str, amount: int = 1) -> None:
    """Note that something has moved; cheap enough for every micro-batch, decoding step or bucket.

    Args:
        what: in which unit, in plural: `rows`, `bytes`, `decoding steps`.
        amount: how many.
    """
    with _lock:
        _counts[what] += amount


def noted_progress() -> Mapping[str, int]:
    """All that was noted in this process, by unit."""
    with _lock:
        return dict(_counts)
