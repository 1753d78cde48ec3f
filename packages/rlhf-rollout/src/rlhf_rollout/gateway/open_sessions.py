"""The open sessions of a gateway: their names, keys and addresses, and what becomes of those that nobody uses."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from rlhf_core import ConfigError, Trajectory

from rlhf_rollout.gateway.session_turns import OpenSession, SessionLimits
from rlhf_rollout.gateway.sessions import RecordedSession

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionAccess:
    """What the client of one session needs: nothing else of the gateway opens with it."""

    session_id: str
    url: str
    """The base URL for OpenAI's clients; ends in `/v1`."""
    root_url: str
    """The base URL for Anthropic's clients, which append `/v1/messages` themselves."""
    api_key: str = field(repr=False)
    """The key of this session alone."""


class OpenSessions:
    """The open sessions of a gateway by name.

    A session that nobody has used for `idle_s` seconds is dropped when the next one is opened or asked for.
    """

    def __init__(self, *, most: int, idle_s: float) -> None:
        self._most, self._idle_s = most, idle_s
        self._lock = threading.Lock()
        self._open: dict[str, OpenSession] = {}

    def open(self, record: RecordedSession, limits: SessionLimits, address: str) -> SessionAccess:
        """Begin a session; `address` is the server's.

        Raises:
            ConfigError: the name is taken or cannot stand in a URL, or too many sessions are open.
        """
        name = record.session_id
        if not name or {".", "..", ""} & set(name.split("/")) or not name.isprintable():
            raise ConfigError(
                f"gateway: session {name!r} cannot stand in a URL; write a name of printable characters, without "
                "empty parts, `.` and `..` between slashes"
            )
        self._expire(self._open)
        session = OpenSession(record, limits)
        with self._lock:
            if name in self._open:
                raise ConfigError(f"gateway: session {name!r} is open already; choose another name")
            if len(self._open) >= self._most:
                raise ConfigError(
                    f"gateway: {self._most} sessions are open (max_sessions); close some, or raise the limit"
                )
            self._open[name] = session
        root = f"{address}/sessions/{quote(name)}"
        return SessionAccess(session_id=name, url=f"{root}/v1", root_url=root, api_key=session.api_key)

    def find(self, session_id: str) -> OpenSession | None:
        """The session of this name; None if it is not open, or nobody has used it for too long."""
        session = self._open.get(session_id)
        if session is not None:
            self._expire({session_id: session})
        return self._open.get(session_id)

    def get(self, session_id: str) -> OpenSession:
        """The session of this name.

        Raises:
            ConfigError: there is no such session, or nobody has used it for too long.
        """
        session = self.find(session_id)
        if session is None:
            raise ConfigError(
                f"gateway: there is no open session {session_id!r}: it was never opened, is closed, or nobody "
                f"used it for {self._idle_s:g} s (session_idle_s)"
            )
        return session

    def close(self, session_id: str, *, wait_s: float) -> list[Trajectory]:
        """See `Gateway.close_session`."""
        session = self.get(session_id)
        if not session.wait(wait_s):
            _log.warning("session %r: turns are under way after %g s, and are aborted", session_id, wait_s)
        self.drop(session_id, "it was closed")
        with session.change:
            return session.record.trajectories()

    def drop(self, session_id: str, reason: str) -> None:
        """See `Gateway.drop_session`."""
        session = self.get(session_id)
        session.end(reason)
        with self._lock:
            self._open.pop(session_id, None)

    def _expire(self, sessions: Mapping[str, OpenSession]) -> None:
        """Drop those of the sessions that nobody has used for too long."""
        now = time.monotonic()
        with self._lock:
            for name, session in tuple(sessions.items()):
                with session.change:
                    if session.turns or session.ending or now - session.last_used <= self._idle_s:
                        continue
                    session.ending = True
                _log.warning("session %r is dropped: nobody used it for %g s", name, self._idle_s)
                self._open.pop(name, None)


def same_secret(given: str, secret: str) -> bool:
    """Whether two secrets are equal, in a time that tells nothing of where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())
