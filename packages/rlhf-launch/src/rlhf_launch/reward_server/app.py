"""The HTTP side of `rlhf serve-rm`: one ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_core import DataError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf_launch.reward_server.batching import BatchedRows, QueueFullError, ServerClosingError
from rlhf_launch.reward_server.requests import RowEncoder, parse

_log = logging.getLogger(__name__)

_GONE = 499


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """What a client may send."""

    max_body_bytes: int = 32 << 20
    body_s: float = 60.0
    """How long a body may take to arrive."""


class RewardServer:
    """ASGI application that scores texts. `close` once the server has ended.

    Whatever a client sends is answered 200, 400 (a sentence says what is wrong with it), 401, 408, 413 or 429 (too
    much waits; `Retry-After`). 503 is this side's fault: the model failed, or the server is ending.
    """

    def __init__(
        self,
        batches: BatchedRows,
        encoder: RowEncoder,
        *,
        name: str,
        token: str = "",
        limits: ServerLimits | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`token` is what clients must send; `on_close` ends what `batches` needs."""
        self._batches, self._encoder, self._name, self._token = batches, encoder, name, token
        self._limits = limits or ServerLimits()
        self._on_close = on_close
        paths = ("/", "/score", "/get_reward")
        routes = [Route("/health", self._health), *(Route(path, self._score, methods=["POST"]) for path in paths)]
        self._app = Starlette(routes=routes, lifespan=self._lifespan)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection (ASGI)."""
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self._batches.close)
        self._on_close()

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._name, "waiting": self._batches.waiting})

    async def _score(self, request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return _error(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})
        try:
            body = await asyncio.wait_for(self._body(request), self._limits.body_s)
        except TimeoutError:
            return _error(408, f"the request did not arrive within {self._limits.body_s:g} s")
        except ClientDisconnect:
            return Response(status_code=_GONE)
        if body is None:
            return _error(413, f"the request is larger than {self._limits.max_body_bytes} bytes", _CLOSE)
        try:
            return await self._answer(request, body)
        except DataError as error:
            return _error(400, str(error))
        except QueueFullError as error:
            return _error(429, str(error), {"Retry-After": str(error.retry_after_s)})
        except ServerClosingError as error:
            return _error(503, str(error), {"Retry-After": "10", **_CLOSE})
        except Exception as error:  # of whatever kind: the model's libraries have many
            _log.exception("a batch failed")
            return _error(503, f"the model failed: {type(error).__name__}: {error}", {"Retry-After": "1"})

    async def _answer(self, request: Request, body: bytes) -> Response:
        asked = await asyncio.to_thread(parse, body)
        rows = await asyncio.to_thread(self._encoder.rows, asked)
        scores: list[float] = []
        if rows:
            scoring = asyncio.wrap_future(self._batches.submit(rows))
            leaving = asyncio.ensure_future(_left(request))
            try:
                await asyncio.wait({scoring, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not scoring.done():  # nobody waits for it any more
                    return Response(status_code=_GONE)
                scores = scoring.result()
            finally:
                leaving.cancel()
                scoring.cancel()
        return JSONResponse({asked.answer: scores})

    async def _body(self, request: Request) -> bytes | None:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._limits.max_body_bytes:
                return None
            parts.append(part)
        return b"".join(parts)


_CLOSE: Mapping[str, str] = {"Connection": "close"}


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": text}, status_code=status, headers=headers)
