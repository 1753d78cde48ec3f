"""Coroutines on threads with event loops of their own: they run whether or not the caller's thread has a loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._left = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread was not closed yet."""
        return self._thread.is_alive() and not self._left

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Start a coroutine and wait for its result."""
        return self.start(work).result()

    def cancel_all(self) -> None:
        """Cancel whatever is under way, and wait until it has ended."""
        if self.running:
            self.run(_cancel_tasks())

    def close(self, *, timeout_s: float = 15.0) -> None:
        """Cancel what is under way and end the thread; may be called twice.

        Code that blocks the thread cannot be ended from outside; after the timeout it is left to itself, and ends
        with the process.
        """
        if not self.running:
            return
        cancelling = self.start(_cancel_tasks())
        cancelling.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._loop.stop))
        self._thread.join(timeout_s)
        self._left = self._thread.is_alive()
        if self._left:
            _log.warning("the thread %s is blocked and cannot be ended; it is left behind", self._thread.name)
        else:
            self._loop.close()


async def _cancel_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
