"""Bodies of requests: read in bounded time and memory, and taken apart where they hold nobody up."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rlhf_core import DataError
from starlette.requests import Request

T = TypeVar("T")

_MOST_DEPTH = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LARGE_BYTES = 64 << 10


class Lanes:
    """Threads for what takes time: tokenising and templates. Large requests have threads of their own.

    So neither the event loop nor small requests wait for a large one.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(4, thread_name_prefix="gateway")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="gateway, large")

    async def run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work`, which is for a request of `size` bytes."""
        lane = self._large if size > _LARGE_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(lane, work, *arguments)


async def read_body(request: Request, *, most: int, seconds: float) -> bytes:
    """The bytes that a client sent.

    Raises:
        DataError: there are more than `most` bytes, or they are not here after `seconds`.
    """

    async def read() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise DataError(f"the request is larger than {most} bytes")
            parts.append(part)
        return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), seconds)
    except TimeoutError:
        raise DataError(f"the request did not arrive within {seconds:g} s") from None


def parse_body(text: bytes, model: str) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        DataError: the text is not a JSON object, or holds what cannot be answered: NaN, numbers of thousands of
            digits, halves of characters, deep nesting; or it asks for another model.
    """
    try:
        body = json.loads(text, parse_constant=_no_constant)
        if _SURROGATE.search(text):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(
            "the request has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
        ) from None
    except RecursionError:
        raise DataError("the request is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise DataError(f"the request must be a JSON object, got a {type(body).__name__}")
    if text.count(b"[") + text.count(b"{") > _MOST_DEPTH:
        _check_depth(body)
    if not isinstance(asked := body.get("model"), str) or asked != model:
        raise DataError(f"there is no model {str(asked)[:200]!r} here; this is {model!r}")
    return {name: value for name, value in body.items() if value is not None}


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _check_depth(body: Any) -> None:
    level: list[Any] = [body]
    for _ in range(_MOST_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return
    raise DataError(f"the request is nested more than {_MOST_DEPTH} deep")
