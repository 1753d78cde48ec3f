"""The clock and the threads of a run's controller, which a simulation puts its own in the place of."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rlhf_launch.workers.coroutines import LoopThread


class Clock(Protocol):
    """Time, waiting, and what runs beside the caller."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        """Block this thread until one of the futures is done, or for so many seconds."""
        ...

    def lock(self) -> AbstractContextManager[Any]:
        """A lock that may be held while its owner waits."""
        ...

    def loop_thread(self, name: str) -> LoopThread:
        """A new event loop on a thread of its own."""
        ...

    async def in_thread(self, run: Callable[[], None]) -> None:
        """Run something that blocks, beside this event loop."""
        ...


class WallClock:
    """The time of the real world."""

    def now(self) -> float:
        """See Clock."""
        return time.monotonic()

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        """See Clock."""
        concurrent.futures.wait(futures, timeout=timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)

    def lock(self) -> AbstractContextManager[Any]:
        """See Clock."""
        return threading.Lock()

    def loop_thread(self, name: str) -> LoopThread:
        """See Clock."""
        return LoopThread(name)

    async def in_thread(self, run: Callable[[], None]) -> None:
        """See Clock."""
        import asyncio

        await asyncio.to_thread(run)
