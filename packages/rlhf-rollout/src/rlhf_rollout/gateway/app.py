"""An OpenAI-compatible server in front of a rollout backend, through which any agent framework can be trained.

Agents talk to `/v1/chat/completions` as they would to any model. What they are answered is recorded per session
with its token ids, log-probs and weight versions, and comes out as trajectories; earlier turns go back into the
model as the very tokens that were sampled.

    with Gateway(backend, tokenizer, GatewayConfig(model="policy", max_model_len=8192)) as gateway:
        access = gateway.open_session("task-7/0", group_id="task-7", metadata={"answer": "42"})
        await run_agent(AsyncOpenAI(base_url=access.url, api_key=access.api_key))
        trajectories = gateway.close_session("task-7/0")

Needs the extra `gateway`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_core import ConfigError, RLHFError, SamplingConfig, Trajectory
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rlhf_rollout.chat.tokens import ChatTokens
from rlhf_rollout.chat.tool_calls import ToolCallParser, tagged_json, tool_call_parser
from rlhf_rollout.gateway.bodies import read_body
from rlhf_rollout.gateway.config import GatewayConfig
from rlhf_rollout.gateway.http import AccessDenied, ServerThread, error_response, sent_key, status_of
from rlhf_rollout.gateway.open_sessions import OpenSessions, SessionAccess, same_secret
from rlhf_rollout.gateway.service import Asked, Endpoint, Service
from rlhf_rollout.gateway.session_turns import OpenSession, SessionLimits, TurnUnderWay
from rlhf_rollout.gateway.sessions import RecordedSession
from rlhf_rollout.generator import Generator

_log = logging.getLogger(__name__)


class Gateway:
    """Serves from `start`, or the beginning of a `with` block, to `close`, or its end.

    `parse_tool_calls` finds tool calls in an answer if the request offers tools; the default is the format that the
    chat template teaches, or that of Hermes and Qwen where it teaches none. With a `processor` (see
    `rlhf_core.load_processor`) and a backend that takes images, messages may have some.
    """

    def __init__(
        self,
        backend: Generator,
        tokenizer: Any,
        config: GatewayConfig,
        *,
        parse_tool_calls: ToolCallParser | None = None,
        processor: Any = None,
    ) -> None:
        self.api_key = config.api_key or secrets.token_urlsafe(32)
        """The master key: it opens everything. Agents get the keys of their sessions."""
        self._config = config
        self._tokens = ChatTokens(tokenizer, processor)
        parse = parse_tool_calls or tool_call_parser(tokenizer) or tagged_json
        service = Service(backend, self._tokens, config, parse)
        self._sessions = OpenSessions(most=config.max_sessions, idle_s=config.session_idle_s)
        self._server: ServerThread | None = None
        endpoints = [
            ("/openapi.json", service.schema, "GET"),
            ("/v1/models", service.models, "GET"),
            ("/v1/models/{model:path}", service.model, "GET"),
            ("/v1/chat/completions", service.chat, "POST"),
            ("/v1/completions", service.completions, "POST"),
            ("/v1/messages", service.messages, "POST"),
            ("/v1/responses", service.responses, "POST"),
        ]
        self.app = Starlette(
            routes=[
                Route(prefix + path, _Served(partial(self._answer, endpoint)), methods=[method])
                for prefix in ("", "/sessions/{session:path}")
                for path, endpoint, method in endpoints
            ]
        )
        """The ASGI application, to mount elsewhere."""

    # ------------------------------------------------------------ life

    def start(self) -> str:
        """Listen; returns the base URL for clients without a session."""
        config = self._config
        self._server = ServerThread(self.app, host=config.host, port=config.port, headers_s=config.request_s)
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
        self,
        session_id: str,
        *,
        group_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        sampling: SamplingConfig | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        deadline_s: float | None = None,
    ) -> SessionAccess:
        """Begin to record; returns what the session's client needs.

        Args:
            session_id: unique among the open sessions.
            group_id: shared by the sessions of one task; the session's own id if not given.
            metadata: goes into the trajectories.
            sampling: fixed settings of the session's turns, in place of those of the configuration.
            max_turns: samples in all; a request beyond them is refused.
            max_tokens: sampled tokens in all; turns are cut at what is left, a request beyond them is refused.
            deadline_s: seconds from now after which turns are aborted and refused.

        Raises:
            ConfigError: the name is taken or cannot stand in a URL, a limit is not positive, or too many sessions
                are open.
        """
        limits = SessionLimits(sampling=sampling, max_turns=max_turns, max_tokens=max_tokens, deadline_s=deadline_s)
        record = RecordedSession(
            session_id=session_id,
            group_id=group_id or session_id,
            metadata=metadata or {},
            image_tokens=self._tokens.images,
        )
        return self._sessions.open(record, limits, self._address)

    def session(self, session_id: str) -> RecordedSession:
        """What is recorded of the open session of this id.

        Raises:
            ConfigError: there is no such session.
        """
        return self._sessions.get(session_id).record

    def close_session(self, session_id: str) -> list[Trajectory]:
        """End a session and return what was recorded; its URL answers no longer.

        Blocks until its turns under way are recorded, `close_wait_s` at most; what is left then is aborted. On an
        event loop that serves the gateway or its backend, call it through `asyncio.to_thread`.

        Raises:
            ConfigError: there is no such session.
        """
        return self._sessions.close(session_id, wait_s=self._config.close_wait_s)

    def drop_session(self, session_id: str) -> None:
        """End a session at once and forget it; its turns under way are aborted.

        Raises:
            ConfigError: there is no such session.
        """
        self._sessions.drop(session_id, "it was dropped")

    @property
    def _address(self) -> str:
        if self._server is None:
            raise ConfigError("gateway: it does not listen yet; call start() or use it in a `with` block")
        return self._server.address

    # ------------------------------------------------------------ requests

    async def _answer(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, behind the keys, with errors as clients understand them."""
        request = Request(scope, receive, send)
        with ExitStack() as turns:
            try:
                session = self._admitted(request)
                text = await read_body(request, most=self._config.max_body_bytes, seconds=self._config.request_s)
                turn = turns.enter_context(TurnUnderWay(session)) if session is not None else None
                response = await endpoint(Asked(request=request, text=text, turn=turn))
            except RLHFError as error:
                response = error_response(status_of(error), str(error))
            except ClientDisconnect:
                return
            except Exception as error:
                _log.exception("a request could not be answered")
                response = error_response(500, f"the gateway failed: {type(error).__name__}")
            await response(scope, receive, send)

    def _admitted(self, request: Request) -> OpenSession | None:
        """The session that a request is for, if any.

        Raises:
            AccessDenied: the key opens neither the gateway nor the session, or there is no such session.
        """
        key = sent_key(request)
        name = request.path_params.get("session")
        session = self._sessions.find(name) if name is not None else None
        if same_secret(key, self.api_key):
            if name is not None and session is None:
                raise AccessDenied(404, f"there is no open session {name!r}")
        elif session is None or not same_secret(key, session.api_key):
            which = "the API key is missing or wrong" + (", or its session is no longer open" if name else "")
            raise AccessDenied(401, f"{which}; send it as `Authorization: Bearer <key>` or `x-api-key: <key>`")
        return session


@dataclass(frozen=True, slots=True)
class _Served:
    """An ASGI application of one endpoint: a turn is under way until its answer is sent."""

    answer: Callable[[Scope, Receive, Send], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(scope, receive, send)
