"""Transfers that stand still are ended from a thread of their own, not by whoever waits for them.

A broadcast over NCCL to a receiver that is dead never ends, and whatever waits for the device waits with it: the
next gather of the training engine, in which no deadline of ours can be looked at. A guard looks at the broadcasts
under way from beside, and aborts their group when the deadline is over or the sender is released: the kernels then
end, the device goes on, and the sender finds out why.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from rlhf_core.errors import DeadlineExceeded, RLHFError, WeightSyncError

_POLL_S = 0.05
_ASK_EVERY = 5
"""Looks at the works for each look at the notes, which asks another process."""
_SPIN_S = (1e-5, 2e-3)


class Work(Protocol):
    """A transfer under way."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; never blocks."""
        ...


class TransferGuard:
    """Watches the transfers of one link.

    Args:
        what: the link, for messages.
        abort: ends all transfers at once; called at most once, from the guard's thread.
        given_up: whether somebody knows that the transfers will not end; called on the guard's thread.
        timeout_s: how long a transfer may take.
    """

    def __init__(
        self, what: str, abort: Callable[[], None], given_up: Callable[[], bool], *, timeout_s: float
    ) -> None:
        self._what, self._abort, self._given_up, self._timeout_s = what, abort, given_up, timeout_s
        self._works: list[tuple[Work, float]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._ended: RLHFError | None = None
        self._thread: threading.Thread | None = None

    def watch(self, work: Work) -> None:
        """Look after a transfer that has begun."""
        with self._changed:
            self._works.append((work, time.monotonic() + self._timeout_s))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weight-link-guard", daemon=True)
                self._thread.start()
            self._changed.notify()

    def wait(self, work: Work) -> None:
        """Block until a transfer has ended. The host looks at it, so no device is waited for.

        Raises:
            DeadlineExceeded: it took too long, and was ended.
            WeightSyncError: the sender was released, or the link closed.
        """
        look_until(lambda: work.is_completed() or self._ended is not None or self._closed)
        self.check()

    def check(self) -> None:
        """Raise what the transfers were ended for, if they were."""
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))

    def close(self) -> None:
        """Watch no more, and hold nothing of the group, whose connections end with it."""
        with self._changed:
            self._closed = True
            self._abort = _nothing
            self._works.clear()
            self._changed.notify()

    def unfinished(self) -> list[Work]:
        """The transfers that are under way."""
        with self._changed:
            return [work for work, _ in self._works if not work.is_completed()]

    def _run(self) -> None:
        looks = 0
        while not self._closed:
            with self._changed:
                self._works = [(work, end) for work, end in self._works if not work.is_completed()]
                if not self._works:
                    if self._changed.wait_for(lambda: self._works or self._closed, timeout=None):
                        looks = 0
                    continue
                late = time.monotonic() > min(end for _, end in self._works)
            looks += 1
            if (reason := self._reason(late=late, ask=looks % _ASK_EVERY == 0)) is not None:
                self._ended = reason
                with contextlib.suppress(RuntimeError):  # torch's: some receivers are gone, which is why
                    self._abort()
                return
            time.sleep(_POLL_S)

    def _reason(self, *, late: bool, ask: bool) -> RLHFError | None:
        if late:
            return DeadlineExceeded(
                f"waited {self._timeout_s:g} s for receivers to take the weights that come over the {self._what}"
            )
        try:
            released = ask and self._given_up()
        except RLHFError:
            released = False  # the deadline is still there
        if released:
            return WeightSyncError(f"sending over the {self._what} was given up, since not all receivers live")
        return None


def look_until(done: Callable[[], bool], *, timeout_s: float = math.inf) -> bool:
    """Look again and again, first soon and then every 2 ms; False if it is not so in time."""
    deadline, pause = time.monotonic() + timeout_s, _SPIN_S[0]
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _SPIN_S[1])
    return True


def _nothing() -> None:
    """The group is closed already."""
