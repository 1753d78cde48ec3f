"""Calling an environment so that a slow, blocking or failing one hurts its own episode alone."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from rlhf_core import DeadlineExceeded, Observation, RLHFError, note_progress


class EnvironmentFailed(RLHFError):
    """An environment raised an exception, or returned something else than an Observation."""


class EnvironmentTooSlow(DeadlineExceeded):
    """A `reset` or `step` missed its deadline."""


async def call_environment(method: Callable[..., Any], *arguments: Any, timeout_s: float) -> Observation:
    """Call `reset` or `step` and return its Observation.

    A coroutine function runs on this event loop; any other function in a thread of its own, which cannot be killed:
    one that hangs is left behind.

    Raises:
        EnvironmentTooSlow: the method did not return within `timeout_s`.
        EnvironmentFailed: the method raised, or returned something else than an Observation.
    """
    name = getattr(method, "__qualname__", repr(method))
    try:
        async with asyncio.timeout(timeout_s):
            try:
                if inspect.iscoroutinefunction(method):
                    answer = await method(*arguments)
                else:
                    answer = await in_thread(method, *arguments)
                    answer = await answer if inspect.isawaitable(answer) else answer
            except Exception as error:
                raise EnvironmentFailed(f"{name} raised {type(error).__name__}: {error}") from error
    except TimeoutError as error:  # this deadline's: those of the method itself are EnvironmentFailed by now
        raise EnvironmentTooSlow(f"{name} did not return within {timeout_s:g} s") from error
    note_progress("environment steps")
    if not isinstance(answer, Observation):
        raise EnvironmentFailed(f"{name} returned {answer!r}; return an Observation")
    return answer


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a blocking function in a thread of its own.

    Not in the event loop's pool: it has few threads, and they are joined at exit, so one that hangs would hang the
    run.
    """
    future: Future[Any] = Future()

    def run() -> None:
        # Who waited may have gone: then the future is cancelled and takes no outcome any more.
        with contextlib.suppress(InvalidStateError):
            try:
                result = function(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return await asyncio.wrap_future(future)
