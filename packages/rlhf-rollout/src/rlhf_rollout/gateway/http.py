"""The gateway's side of HTTP: a server in a thread, bodies, errors as clients read them, clients that go away."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Mapping
from functools import partial
from typing import Any, TypeVar

import uvicorn
from rlhf_core import ConfigError, DeadlineExceeded, RLHFError, UserError
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rlhf_rollout.gateway.session_turns import SessionRefused

T = TypeVar("T")

_STOP_S = 30.0
_KEEP_ALIVE_S = 75
"""Longer than clients keep a connection that idles: who closes it first loses a request that is on its way."""


_HTTPProtocol: Any = AutoHTTPProtocol
"""uvicorn's, of which there are two with the same attributes."""


class _HurriedProtocol(_HTTPProtocol):
    """Closes connections of clients who send half of a request's head and no more."""

    def __init__(self, *arguments: Any, patience_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._patience_s = patience_s
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if not self._waits():
            self._relax()
        elif self._late is None:
            self._late = self.loop.call_later(self._patience_s, self._give_up)

    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _relax(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self._waits():
            self.transport.close()


class ServerThread:
    """An ASGI application served from a thread of this process. Listens when constructed.

    Raises:
        ConfigError: the address is taken, or is not this machine's.
    """

    def __init__(self, app: Any, *, host: str, port: int, headers_s: float = 30.0) -> None:
        """Connections whose next request has no whole head within `headers_s` are closed."""
        try:
            # Bound here and handed over open, so that nobody can take the port in between.
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another port (0: any)") from error
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=_KEEP_ALIVE_S,
            http=partial(_HurriedProtocol, patience_s=headers_s),  # type: ignore[arg-type]
            ws="none",
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


class AccessDenied(RLHFError):
    """A request without the right key, or for a session that is not open."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def sent_key(request: Request) -> str:
    """The API key of a request, as OpenAI's or Anthropic's clients send it; empty if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def status_of(error: RLHFError) -> int:
    """The HTTP status of an error: 400 for what the client can mend, 403 for what its session may not, else 503."""
    if isinstance(error, AccessDenied):
        return error.status
    if isinstance(error, SessionRefused):
        return 403
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


def server_event(chunk: Mapping[str, Any], name: str = "") -> str:
    """One event of a stream, with a name if the API gives it one."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(chunk)}\n\n"


async def named_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events of a stream; an error becomes its last one."""
    try:
        async for event in events:
            yield event
    except RLHFError as error:
        yield server_event(error_body(status_of(error), str(error)), "error")


def error_response(status: int, message: str) -> Response:
    """An answer that says what went wrong."""
    return json_response(error_body(status, message), status)


def json_response(answer: Mapping[str, Any], status: int = 200) -> Response:
    """An answer of plain ASCII: what was sampled may hold halves of characters, which have no UTF-8."""
    return Response(json.dumps(answer), status_code=status, media_type="application/json")


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in a form that OpenAI's and Anthropic's clients both read."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": status}}
