"""The gateway's side of HTTP: a server in a thread, bodies, errors as clients read them, clients that go away."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import uvicorn
from rlhf_core import ConfigError, DataError, DeadlineExceeded, RLHFError, UserError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

T = TypeVar("T")

_STOP_S = 30.0


class ServerThread:
    """An ASGI application served from a thread of this process. Listens when constructed.

    Raises:
        ConfigError: the address is taken, or is not this machine's.
    """

    def __init__(self, app: Any, *, host: str, port: int) -> None:
        try:
            # Bound here and handed over open, so that nobody can take the port in between.
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another port (0: any)") from error
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="gateway", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and wait for the thread."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the server at {self.address} did not stop within {_STOP_S:g} s")
        self._socket.close()


async def read_body(request: Request, *, most: int, model: str) -> Mapping[str, Any]:
    """The JSON object that a client sent.

    Raises:
        DataError: the body is larger than `most` bytes, is not a JSON object, or asks for another model.
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
    """The HTTP status of an error: 400 for what the client can mend, else 503."""
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
