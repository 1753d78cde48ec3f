"""The end of a run before its last step, in good order: asked for by a signal, a preemption notice or a program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlhf_core.errors import RunStopped

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, the end of a job, and the notice that SLURM's `--signal` sends ahead of it by custom."""


class StopRequest:
    """Whether a run was asked to end, and why. The first reason counts; any thread may ask.

    The run looks at its boundaries (`check`), where its state is whole. While it waits for others it may be ended
    right away (`interruptible`), if the request is a signal and the run has the main thread.

    >>> stop = StopRequest()
    >>> stop.ask("the budget is spent")
    >>> stop.reason
    'the budget is spent'
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: RunStopped | None = None
        self._interruptible = False

    @property
    def reason(self) -> str | None:
        """Why the run is to end; None while it is not."""
        return None if self._error is None else str(self._error)

    def ask(self, reason: str, *, exit_code: int = 1) -> None:
        """Ask the run to end at its next boundary."""
        with self._lock:
            self._error = self._error or RunStopped(reason, exit_code=exit_code)

    def check(self) -> None:
        """End the run here if it was asked to.

        Raises:
            RunStopped: it was.
        """
        if self._error is not None:
            raise self._error

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that changes nothing, so that a signal may end it anywhere: a wait.

        Raises:
            RunStopped: the run was asked to end, before the block or in it.
        """
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False

    @contextmanager
    def on_signals(self, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
        """Let `STOP_SIGNALS` ask for the end; a second Ctrl-C or SIGTERM ends the process's work at once.

        Outside the main thread, where Python takes no signals, the block changes nothing.

        Args:
            say: is told what was received and what happens now.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def receive(number: int, frame: FrameType | None) -> None:
            name = signal.Signals(number).name
            if self._error is not None:
                if number == signal.SIGUSR1:
                    return
                raise KeyboardInterrupt
            self.ask(f"{name} was received", exit_code=128 + number)
            if self._interruptible:
                self.check()
            say(f"{name}: the run ends after this step, with a checkpoint; again ends it at once")

        before = {number: signal.signal(number, receive) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
