"""Calling an environment so that a slow, blocking or failing one hurts its own episode alone."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import operator
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from typing import Any

from rlhf_core import DeadlineExceeded, Observation, RLHFError, note_progress


class EnvironmentFailed(RLHFError):
    """An environment raised an exception, or returned what is no Observation or cannot become tokens."""


class EnvironmentTooSlow(DeadlineExceeded):
    """An environment, or an episode as a whole, missed its deadline."""


async def call_environment(method: Callable[..., Any], *arguments: Any, timeout_s: float) -> Observation:
    """Call `reset` or `step` and return its Observation, with its numbers as Python has them.

    Raises:
        EnvironmentTooSlow: the method did not return within `timeout_s`.
        EnvironmentFailed: the method raised, or returned something else than an Observation.
    """
    answer = await call_by_deadline(method, *arguments, timeout_s=timeout_s)
    note_progress("environment steps")
    name = _name_of(method)
    if not isinstance(answer, Observation):
        raise EnvironmentFailed(f"{name} returned {answer!r}; return an Observation")
    try:
        info = {str(key): float(value) for key, value in answer.info.items()}
        token_ids = tuple(operator.index(token) for token in answer.token_ids)
        plain = replace(answer, info=info, token_ids=token_ids, reward=float(answer.reward))
    except Exception as error:
        raise EnvironmentFailed(
            f"{name} returned an Observation whose reward, info or token_ids are no numbers: {error}"
        ) from error
    if not isinstance(answer.text, str):
        raise EnvironmentFailed(f"{name} returned an Observation whose text is a {type(answer.text).__name__}")
    if wrong := [key for key, value in info.items() if not math.isfinite(value)]:
        raise EnvironmentFailed(f"{name} returned info[{wrong[0]!r}]={info[wrong[0]]}; log finite numbers")
    return plain


async def call_by_deadline(method: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Call a method of an environment, or what makes one.

    A coroutine function runs on this event loop; any other function in a thread of its own, which cannot be killed:
    one that hangs is left behind.

    Raises:
        EnvironmentTooSlow: the method did not return within `timeout_s`.
        EnvironmentFailed: the method raised, be it an exception that would end the process.
    """
    name = _name_of(method)
    try:
        async with asyncio.timeout(timeout_s):
            try:
                if inspect.iscoroutinefunction(method):
                    return await method(*arguments)
                answer = await in_thread(method, *arguments)
                return await answer if inspect.isawaitable(answer) else answer
            except (EnvironmentFailed, EnvironmentTooSlow):  # of one in a process of its own
                raise
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise _failure(name, error) from error  # its own doing
            except (Exception, SystemExit, GeneratorExit) as error:
                raise _failure(name, error) from error
    except TimeoutError as error:  # this deadline's: those of the method itself are EnvironmentFailed by now
        raise EnvironmentTooSlow(f"{name} did not return within {timeout_s:g} s") from error


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a blocking function in a thread of its own.

    Not in the event loop's pool: it has few threads, and they are joined at exit, so one that hangs would hang the
    run. What the function raises comes as an ordinary exception: one that ends a process as `EnvironmentFailed`.
    """
    future: Future[Any] = Future()
    name = _name_of(function)

    def run() -> None:
        # Who waited may have gone: then the future is cancelled and takes no outcome any more.
        with contextlib.suppress(InvalidStateError):
            try:
                result = function(*arguments)
            except BaseException as error:
                # A future takes no StopIteration, and passes what is no Exception on as the loop's own end.
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if plain else _failure(name, error))
            else:
                future.set_result(result)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return await asyncio.wrap_future(future)


def _failure(name: str, error: BaseException) -> EnvironmentFailed:
    return EnvironmentFailed(f"{name} raised {type(error).__name__}: {error}")


def _name_of(method: Callable[..., Any]) -> str:
    method = getattr(method, "func", method)  # of a function with some of its arguments
    return getattr(method, "__qualname__", None) or repr(method)
