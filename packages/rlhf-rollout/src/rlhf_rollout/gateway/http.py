"""The gateway's side of HTTP: reading a body, errors as clients understand them, clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from rlhf_core import DataError, RLHFError, UserError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

T = TypeVar("T")


async def read_body(request: Request, *, most: int, model: str) -> Mapping[str, Any]:
    """The JSON object that a client sent.

    Raises:
        DataError: it is larger than `most` bytes, no JSON object, or asks for another model.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise DataError(f"the request is larger than {most} bytes")
        parts.append(part)
    try:
        body = json.loads(b"".join(parts))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise DataError(f"the request must be a JSON object, got a {type(body).__name__}")
    if body.get("model") != model:
        raise DataError(f"there is no model {body.get('model')!r} here; this is {model!r}")
    return body


def status_of(error: RLHFError) -> int:
    """400 for what the client can mend, else 503."""
    return 400 if isinstance(error, UserError) else 503


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`; None if the client goes away first, whereupon `work` is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()


def server_event(chunk: Mapping[str, Any]) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(chunk)}\n\n"


def error_response(status: int, message: str) -> Response:
    """An answer that says what went wrong."""
    return JSONResponse({"error": error_body(status, message)}, status_code=status)


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in the API's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": None, "code": status}
