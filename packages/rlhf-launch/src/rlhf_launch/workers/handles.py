"""Handles: the way to call a worker without knowing where it runs.

A worker is a plain Python class. A handle starts its methods and returns futures: `LocalHandle` runs them on a
thread of this process, `placement.ray.RayHandle` in an actor. Everything above handles is the same code for both.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from typing import Any, Protocol

from rlhf_core import DeadlineExceeded, EngineDiedError

from rlhf_launch.workers.coroutines import LoopThread

CLOSE_TIMEOUT_S = 15.0
"""Seconds that workers have to close, all of them together."""


class Handle(Protocol):
    """A worker, wherever it runs."""

    name: str

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start `worker.method(*args, **kwargs)`."""
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
        self._thread = LoopThread(name)

        async def construct() -> Any:
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
                result = getattr(worker, method)(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result
            except asyncio.CancelledError:
                if self._closing:
                    raise EngineDiedError(f"{self.name} was closed during {method}") from None
                raise

        return self._thread.start(run())

    def begin_close(self) -> Future[Any]:
        """See Handle."""
        if self._thread.running:
            return self.call("close")
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def end(self) -> None:
        """See Handle."""
        if not self._thread.running:
            return
        # Whoever waits for a call that is still under way must not wait for ever: it ends with an error.
        self._closing = True
        self._thread.close()


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


def gather(futures: Sequence[Future[Any]], *, what: str, timeout_s: float) -> list[Any]:
    """Results of calls, in order. The first failure is raised at once, without waiting for the others.

    Args:
        futures: calls under way.
        what: what is awaited, for the error message.
        timeout_s: deadline for all of them together.

    Raises:
        DeadlineExceeded: names `what` and how many of the calls had returned.
    """
    done, pending = wait(futures, timeout=timeout_s, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future in done and (error := future.exception()) is not None:
            raise error
    if pending:
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for {what}; {len(done)} of {len(futures)} calls returned. Look at the "
            "workers' logs, or raise `placement.timeout_s`"
        )
    return [future.result() for future in futures]


def call_all(handles: Iterable[Handle], method: str, *args: Any, what: str, timeout_s: float) -> list[Any]:
    """Results of the same call on every worker, made at once; see `gather`."""
    return gather([handle.call(method, *args) for handle in handles], what=what, timeout_s=timeout_s)
