"""An OpenAI-compatible server in front of a rollout backend, through which any agent framework can be trained.

Agents talk to `/v1/chat/completions` as they would to any model. What they are answered is recorded per session
with its token ids, log-probs and weight versions, and comes out as trajectories; earlier turns go back into the
model as the very tokens that were sampled.

    with Gateway(backend, tokenizer, GatewayConfig(model="policy", max_model_len=8192)) as gateway:
        url = gateway.open_session("task-7/0", group_id="task-7", metadata={"answer": "42"})
        await run_agent(AsyncOpenAI(base_url=url, api_key=gateway.api_key))
        trajectories = gateway.close_session("task-7/0")

Needs the extra `gateway`.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from rlhf_core import (
    ConfigError,
    DataError,
    GenerationRequest,
    GenerationResult,
    RLHFError,
    Sample,
    SamplingConfig,
    Trajectory,
    UserError,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlhf_rollout.conversation_tokens import ConversationTokens, plain_message
from rlhf_rollout.gateway_answers import Answer, ToolReader, read_tagged_calls
from rlhf_rollout.gateway_requests import read_prompt, read_settings
from rlhf_rollout.gateway_server import ServerThread
from rlhf_rollout.gateway_sessions import Prompt, Session
from rlhf_rollout.gateway_stream import Generator, Work, stream_chunks

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Settings of a gateway."""

    model: str
    """Name under which clients ask for the model."""
    max_model_len: int
    """Prompt plus response tokens that the backend takes."""
    sampling: SamplingConfig | None = None
    """Settings for all requests: clients can only ask for shorter answers and further stops. None: as they ask."""
    host: str = "127.0.0.1"
    """Address to listen on. Another one than loopback opens the model to the network: use it behind TLS."""
    port: int = 0
    """0 takes a free one."""
    api_key: str | None = None
    """What clients must send; None makes a random one."""
    stream_tokens: int = 16
    """Tokens that are sampled between two pieces of a stream; 0 sends the answer when it is complete. Requests with
    several choices, a seed, stops or tools are always sampled in one piece."""
    max_body_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise ConfigError(f"gateway: max_model_len must be at least 2, got {self.max_model_len}")
        if self.stream_tokens < 0:
            raise ConfigError(f"gateway: stream_tokens must be 0 (off) or positive, got {self.stream_tokens}")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("gateway: api_key is empty; give a secret, or leave it out for a random one")


class Gateway:
    """Serves from `start`, or the beginning of a `with` block, to `close`, or its end.

    `read_calls` takes tool calls out of an answer's text if the request offers tools; the default reads the tags of
    Hermes and Qwen.
    """

    def __init__(
        self,
        backend: Generator,
        tokenizer: Any,
        config: GatewayConfig,
        *,
        read_calls: ToolReader = read_tagged_calls,
    ) -> None:
        self.api_key = config.api_key or secrets.token_urlsafe(32)
        self._backend = backend
        self._tokens = ConversationTokens(tokenizer)
        self._config = config
        self._read_calls = read_calls
        self._sessions: dict[str, Session] = {}
        self._server: ServerThread | None = None
        self._numbers = itertools.count()
        endpoints = [
            ("/v1/models", self._models, "GET"),
            ("/v1/chat/completions", self._chat, "POST"),
            ("/v1/completions", self._completions, "POST"),
        ]
        self.app = Starlette(
            routes=[
                Route(prefix + path, self._guarded(endpoint), methods=[method])
                for prefix in ("", "/sessions/{session:path}")
                for path, endpoint, method in endpoints
            ]
        )
        """The ASGI application, to mount elsewhere."""

    # ------------------------------------------------------------ life

    def start(self) -> str:
        """Listen; returns the base URL for clients without a session."""
        config = self._config
        self._server = ServerThread(self.app, host=config.host, port=config.port)
        return self.url

    @property
    def url(self) -> str:
        """The base URL for clients without a session: nothing that they do is recorded."""
        return f"{self._address}/v1"

    def close(self) -> None:
        """Stop listening; may be called twice."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> Gateway:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ sessions

    def open_session(
        self, session_id: str, *, group_id: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> str:
        """Begin to record; returns the base URL for the session's client.

        Args:
            session_id: unique among the open sessions.
            group_id: shared by the sessions of one task; the session's own id if not given.
            metadata: goes into the trajectories.
        """
        if not session_id or session_id in self._sessions:
            raise ConfigError(
                f"gateway: session {session_id!r} is open already, or has no name; choose another name"
            )
        self._sessions[session_id] = Session(
            session_id=session_id, group_id=group_id or session_id, metadata=metadata or {}
        )
        return f"{self._address}/sessions/{quote(session_id)}/v1"

    def session(self, session_id: str) -> Session:
        """An open session."""
        if session_id not in self._sessions:
            raise ConfigError(f"gateway: no open session {session_id!r}")
        return self._sessions[session_id]

    def close_session(self, session_id: str) -> list[Trajectory]:
        """What was recorded; the session's URL answers no longer."""
        trajectories = self.session(session_id).trajectories()
        del self._sessions[session_id]
        return trajectories

    @property
    def _address(self) -> str:
        if self._server is None:
            raise ConfigError("gateway: it does not listen yet; call start() or use it in a `with` block")
        return self._server.address

    # ------------------------------------------------------------ endpoints

    def _guarded(
        self, endpoint: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint behind the API key, with errors as clients understand them."""

        async def guarded(request: Request) -> Response:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), self.api_key.encode()):
                return _error(401, "wrong or missing API key; send it as `Authorization: Bearer <key>`")
            session = request.path_params.get("session")
            if session is not None and session not in self._sessions:
                return _error(404, f"there is no open session {session!r}")
            try:
                return await endpoint(request)
            except RLHFError as error:
                return _error(400 if isinstance(error, UserError) else 503, str(error))

        return guarded

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self._config.model,
            "object": "model",
            "created": 0,
            "owned_by": "rlhf",
            "max_model_len": self._config.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise DataError("`messages` must be a list with at least one message")
        messages = [plain_message(message) for message in body["messages"]]
        tools = [] if body.get("tool_choice") == "none" else list(body.get("tools") or [])
        name = request.path_params.get("session")
        session = self._sessions[name] if name is not None else None
        if session is not None:
            prompt = session.prompt(self._tokens, messages, tools)
        else:
            prompt = Prompt(parent=None, context=self._tokens.prompt(messages, tools))
        work = self._work(body, prompt.token_ids, kind="chat.completion")
        work = replace(work, session=session, prompt=prompt, messages=messages, tools=tools)
        if work.answer.asked.stream:
            return self._stream(work)
        result = await unless_gone(request, self._backend.generate(work.generation))
        if result is None:
            return Response(status_code=499)
        told = [self._record(work, sample, result) for sample in result.samples]
        return JSONResponse(work.answer.chat(result.samples, told))

    async def _completions(self, request: Request) -> Response:
        body = await self._body(request)
        work = self._work(body, read_prompt(body, self._tokens.tokenizer), kind="text_completion")
        if work.answer.asked.stream:
            return self._stream(work)
        result = await unless_gone(request, self._backend.generate(work.generation))
        if result is None:
            return Response(status_code=499)
        return JSONResponse(work.answer.completion(result.samples))

    async def _body(self, request: Request) -> Mapping[str, Any]:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._config.max_body_bytes:
                raise DataError(f"the request is larger than {self._config.max_body_bytes} bytes")
            parts.append(part)
        try:
            body = json.loads(b"".join(parts))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"the request is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise DataError(f"the request must be a JSON object, got a {type(body).__name__}")
        if body.get("model") != self._config.model:
            raise DataError(f"there is no model {body.get('model')!r} here; this is {self._config.model!r}")
        return body

    def _work(self, body: Mapping[str, Any], prompt: tuple[int, ...], *, kind: str) -> Work:
        config = self._config
        asked = read_settings(body, room=config.max_model_len - len(prompt), fixed=config.sampling)
        answer = Answer(
            kind=kind,
            model=config.model,
            created=int(time.time()),
            answer_id=f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{uuid.uuid4().hex}",
            prompt_token_ids=prompt,
            tokenizer=self._tokens.tokenizer,
            asked=asked,
        )
        generation = GenerationRequest(
            request_id=f"gateway/{next(self._numbers)}",
            prompt_token_ids=prompt,
            sampling=asked.sampling,
            n=asked.n,
            seed=asked.seed,
        )
        return Work(answer=answer, generation=generation)

    def _record(self, work: Work, sample: Sample, result: GenerationResult) -> Mapping[str, Any]:
        """The answer as a message, kept in the session if there is one."""
        message = work.answer.message(sample, self._read_calls if work.tools else None)
        if work.session is not None and work.prompt is not None:
            messages = [*work.messages, plain_message(message)]
            work.session.record(work.prompt, sample, result.meaning, messages=messages, tools=work.tools)
        return message

    # ------------------------------------------------------------ streams

    def _stream(self, work: Work) -> Response:
        # Starlette cancels the iterator when the client goes away, and with it the request in the backend.
        return StreamingResponse(self._events(work), media_type="text/event-stream")

    async def _events(self, work: Work) -> AsyncIterator[str]:
        try:
            tell = partial(self._record, work)
            async for chunk in stream_chunks(self._backend, work, tell, slice_tokens=self._config.stream_tokens):
                yield _event(chunk)
        except RLHFError as error:
            yield _event({"error": _error_body(400 if isinstance(error, UserError) else 503, str(error))})
        yield "data: [DONE]\n\n"


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


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": _error_body(status, message)}, status_code=status)


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": None, "code": status}
