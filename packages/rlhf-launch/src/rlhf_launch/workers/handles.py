"""Handles: the way to call a worker without knowing where it runs.

A worker is a plain Python class. A handle starts its methods and returns futures: `LocalHandle` runs them on a
thread of this process, `placement.ray.RayHandle` in an actor. Everything above handles is the same code for both.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from rlhf_core import EngineDiedError

from rlhf_launch.workers.coroutines import LoopThread
from rlhf_launch.workers.pulse import CallsUnderWay, Pulse

T = TypeVar("T")
CLOSE_TIMEOUT_S = 15.0
"""Seconds that workers have to close, all of them together."""


class Handle(Protocol):
    """A worker, wherever it runs."""

    name: str

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start `worker.method(*args, **kwargs)`."""
        ...

    def pulse(self) -> Future[Pulse]:
        """Ask for the worker's pulse, which it gives whatever it is doing.

        Raises:
            EngineDiedError: the worker is gone; the future may raise it, too.
        """
        ...

    def begin_close(self) -> Future[Any]:
        """Ask the worker to close what it holds, when it has done what it is at; may be called twice."""
        ...

    def end(self) -> None:
        """End the worker, whatever it is doing; may be called twice."""
        ...


class LocalHandle:
    """A worker in this process, on an event-loop thread of its own: one method at a time, like an actor.

    Coroutine methods interleave, others block the worker's thread (and only that).
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self._closing = False
        self._calls = CallsUnderWay()
        self._thread = LoopThread(name)

        async def construct() -> Any:
            with self._calls.under_way("construction"):
                return make()

        self._worker = self._thread.start(construct())

    def ready(self) -> Future[Any]:
        """A future of the worker, done when it is constructed."""
        return self._worker

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Handle. The call raises what the constructor of the worker raised, if it did."""
        if not self._thread.running:
            raise EngineDiedError(f"{self.name} is closed; {method} was called")

        async def run() -> Any:
            worker = await asyncio.wrap_future(self._worker)
            try:
                with self._calls.under_way(method):
                    result = getattr(worker, method)(*args, **kwargs)
                    return await result if inspect.isawaitable(result) else result
            except asyncio.CancelledError:
                if self._closing:
                    raise EngineDiedError(f"{self.name} was closed during {method}") from None
                raise

        return self._thread.start(run())

    def pulse(self) -> Future[Pulse]:
        """See Handle."""
        if not self._thread.running:
            raise EngineDiedError(f"{self.name} is closed")
        return finished(self._calls.pulse())

    def begin_close(self) -> Future[Any]:
        """See Handle."""
        return self.call("close") if self._thread.running else finished(None)

    def end(self) -> None:
        """See Handle."""
        if not self._thread.running:
            return
        # Whoever waits for a call that is still under way must not wait for ever: it ends with an error.
        self._closing = True
        self._thread.close()


def finished(result: T) -> Future[T]:
    """A future that is done."""
    done: Future[T] = Future()
    done.set_result(result)
    return done


def close_workers(handles: Iterable[Handle], *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Close workers, all at once, and end them; those busy for longer than the deadline lose their work."""
    handles = list(handles)
    closing = []
    for handle in handles:
        with suppress(Exception):  # the worker is ended below, whatever state it is in
            closing.append(handle.begin_close())
    wait(closing, timeout=timeout_s)
    for handle in handles:
        handle.end()
