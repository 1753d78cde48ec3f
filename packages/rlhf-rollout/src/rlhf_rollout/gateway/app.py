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

import hmac
import itertools
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

from rlhf_core import (
    ConfigError,
    DataError,
    GenerationRequest,
    GenerationResult,
    PackedInts,
    RLHFError,
    Sample,
    Trajectory,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlhf_rollout.chat.messages import plain_message
from rlhf_rollout.chat.tokens import ChatTokens
from rlhf_rollout.chat.tool_calls import ToolCallParser, tagged_json, tool_call_parser
from rlhf_rollout.gateway.answers import Answer
from rlhf_rollout.gateway.config import GatewayConfig
from rlhf_rollout.gateway.http import (
    ServerThread,
    error_body,
    error_response,
    read_body,
    server_event,
    status_of,
    unless_gone,
)
from rlhf_rollout.gateway.requests import read_prompt, read_settings
from rlhf_rollout.gateway.sessions import RecordedSession, TurnPrompt
from rlhf_rollout.gateway.stream import ClientRequest, stream_chunks
from rlhf_rollout.generator import Generator


class Gateway:
    """Serves from `start`, or the beginning of a `with` block, to `close`, or its end.

    `parse_tool_calls` finds tool calls in an answer if the request offers tools; the default is the format that the
    chat template teaches, or that of Hermes and Qwen where it teaches none.
    """

    def __init__(
        self,
        backend: Generator,
        tokenizer: Any,
        config: GatewayConfig,
        *,
        parse_tool_calls: ToolCallParser | None = None,
    ) -> None:
        self.api_key = config.api_key or secrets.token_urlsafe(32)
        self._backend = backend
        self._tokens = ChatTokens(tokenizer)
        self._config = config
        self._parse = parse_tool_calls or tool_call_parser(tokenizer) or tagged_json
        self._sessions: dict[str, RecordedSession] = {}
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
        self._sessions[session_id] = RecordedSession(
            session_id=session_id, group_id=group_id or session_id, metadata=metadata or {}
        )
        return f"{self._address}/sessions/{quote(session_id)}/v1"

    def session(self, session_id: str) -> RecordedSession:
        """The open session of this id.

        Raises:
            ConfigError: there is no such session.
        """
        if session_id not in self._sessions:
            raise ConfigError(f"gateway: no open session {session_id!r}")
        return self._sessions[session_id]

    def close_session(self, session_id: str) -> list[Trajectory]:
        """End a session and return what was recorded; its URL answers no longer."""
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
                return error_response(401, "wrong or missing API key; send it as `Authorization: Bearer <key>`")
            session = request.path_params.get("session")
            if session is not None and session not in self._sessions:
                return error_response(404, f"there is no open session {session!r}")
            try:
                return await endpoint(request)
            except RLHFError as error:
                return error_response(status_of(error), str(error))

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
        body = await read_body(request, most=self._config.max_body_bytes, model=self._config.model)
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise DataError("`messages` must be a list with at least one message")
        messages = [plain_message(message) for message in body["messages"]]
        tools = [] if body.get("tool_choice") == "none" else list(body.get("tools") or [])
        name = request.path_params.get("session")
        session = self._sessions[name] if name is not None else None
        if session is not None:
            prompt = session.prompt(self._tokens, messages, tools)
        else:
            prompt = TurnPrompt(parent=None, context=PackedInts(self._tokens.prompt(messages, tools)))
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
        body = await read_body(request, most=self._config.max_body_bytes, model=self._config.model)
        work = self._work(body, PackedInts(read_prompt(body, self._tokens.tokenizer)), kind="text_completion")
        if work.answer.asked.stream:
            return self._stream(work)
        result = await unless_gone(request, self._backend.generate(work.generation))
        if result is None:
            return Response(status_code=499)
        return JSONResponse(work.answer.completion(result.samples))

    def _work(self, body: Mapping[str, Any], prompt: PackedInts, *, kind: str) -> ClientRequest:
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
        return ClientRequest(answer=answer, generation=generation)

    def _record(self, work: ClientRequest, sample: Sample, result: GenerationResult) -> Mapping[str, Any]:
        """The answer as a message, kept in the session if there is one."""
        message = work.answer.message(sample, self._parse if work.tools else None)
        if work.session is not None and work.prompt is not None:
            messages = [*work.messages, plain_message(message)]
            work.session.record(work.prompt, sample, result.meaning, messages=messages, tools=work.tools)
        return message

    # ------------------------------------------------------------ streams

    def _stream(self, work: ClientRequest) -> Response:
        # Starlette cancels the iterator when the client goes away, and with it the request in the backend.
        return StreamingResponse(self._events(work), media_type="text/event-stream")

    async def _events(self, work: ClientRequest) -> AsyncIterator[str]:
        try:
            tell = partial(self._record, work)
            async for chunk in stream_chunks(self._backend, work, tell, slice_tokens=self._config.stream_tokens):
                yield server_event(chunk)
        except RLHFError as error:
            yield server_event({"error": error_body(status_of(error), str(error))})
        yield "data: [DONE]\n\n"
