"""A server of a sandbox: `wire` has the protocol. Needs the extra `gateway`."""

from __future__ import annotations

import asyncio
import hmac
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from rlhf_core import DataError, ProgramLimits, ProgramOutcome, Sandbox, SandboxError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf_rollout.sandbox.wire import outcome_to_json, program_from_json

_BODY_S = 60.0


class SandboxServer:
    """ASGI application that runs programs for clients who have the token.

    A server gives its sandbox to others: on an address that is not loopback, a token is needed.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        token: str = "",
        workers: int = 4,
        most_body_bytes: int = 128 << 20,
        most: ProgramLimits | None = None,
    ) -> None:
        """Programs are run `workers` at a time; `most` bounds the limits that a client may ask for."""
        self._sandbox, self._token = sandbox, token
        self._most_body, self._most = (
            most_body_bytes,
            most
            or ProgramLimits(
                wall_s=300.0,
                memory_bytes=8 << 30,
                output_bytes=64 << 20,
                processes=256,
                file_bytes=1 << 30,
                files=1 << 16,
            ),
        )
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox server")
        routes = [Route("/v1/health", self._health), Route("/v1/run", self._run, methods=["POST"])]
        self._app = Starlette(routes=routes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection (ASGI)."""
        await self._app(scope, receive, send)

    def close(self) -> None:
        """End the threads; programs that run are left to their deadlines."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _health(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        return JSONResponse({"sandbox": type(self._sandbox).__name__})

    async def _run(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        try:
            body = await asyncio.wait_for(self._body(request), _BODY_S)
        except TimeoutError:
            return _error(408, f"the request did not arrive within {_BODY_S:g} s")
        if body is None:
            return _error(413, f"the request is larger than {self._most_body} bytes")
        try:
            outcomes = await asyncio.wrap_future(self._threads.submit(self._work, body))
        except DataError as error:
            return _error(400, str(error))
        except SandboxError as error:
            return _error(503, str(error))
        return JSONResponse({"outcomes": [outcome_to_json(outcome) for outcome in outcomes]})

    def _work(self, body: bytes) -> tuple[ProgramOutcome, ...]:
        try:
            found = json.loads(body)
            programs = [program_from_json(program) for program in found["programs"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"the request is not {{'programs': [...]}}: {error}") from None
        for program in programs:
            for limit in fields(ProgramLimits):
                asked, most = getattr(program.limits, limit.name), getattr(self._most, limit.name)
                if asked > most:
                    raise DataError(f"{limit.name} is at most {most} here, got {asked}")
        if len(programs) == 1:
            return (self._sandbox.run(programs[0]),)
        if len(programs) != 2:
            raise DataError(f"a request has one program or two, got {len(programs)}")
        return self._sandbox.run_linked(programs[0], programs[1])

    async def _body(self, request: Request) -> bytes | None:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._most_body:
                return None
            parts.append(part)
        return b"".join(parts)

    def _refused(self, request: Request) -> Response | None:
        given = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return _error(401, "the token is missing or wrong")
        return None


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status_code=status)
