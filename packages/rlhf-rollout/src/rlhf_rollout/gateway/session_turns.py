"""What is under way in one open session, and its limits.

Sessions are opened and closed from any thread, their requests are served on an event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from rlhf_core import ConfigError, RLHFError, SamplingConfig

from rlhf_rollout.gateway.sessions import RecordedSession

T = TypeVar("T")


class SessionRefused(RLHFError):
    """A session takes no further turn: it has reached a limit, or it is ending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """How much a session may do."""

    sampling: SamplingConfig | None = None
    """Fixed settings of all its turns, in place of the gateway's."""
    max_turns: int | None = None
    """Samples in all; several choices of one request count each."""
    max_tokens: int | None = None
    """Sampled tokens in all. A turn is cut at what is left; turns at the same time are cut each for itself."""
    deadline_s: float | None = None
    """Seconds from opening to the end of the last turn; a turn under way is aborted."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"gateway: {name} of a session must be positive, got {value}; None: no limit")


class OpenSession:
    """A recorded session with its key, its limits, and the turns under way in it."""

    def __init__(self, record: RecordedSession, limits: SessionLimits) -> None:
        self.record, self.limits = record, limits
        self.api_key = secrets.token_urlsafe(32)
        self.change = threading.Condition(threading.RLock())
        """Held while turns come, go or are recorded; told when one ends."""
        self.last_used = time.monotonic()
        self.ending = False
        self.turns: set[TurnUnderWay] = set()
        self.reserved = 0
        self._deadline = None if limits.deadline_s is None else self.last_used + limits.deadline_s

    @property
    def time_left(self) -> float | None:
        """Seconds to the deadline; None if there is none."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def end(self, reason: str) -> None:
        """Take no further turn, and abort those that are under way."""
        with self.change:
            self.ending = True
            for turn in tuple(self.turns):
                turn.abort(reason)

    def wait(self, seconds: float) -> bool:
        """Take no further turn, and wait for those under way; False if some are left."""
        with self.change:
            self.ending = True
            return self.change.wait_for(lambda: not self.turns, seconds)


class TurnUnderWay:
    """A client's request in a session from its arrival until its samples are recorded. Use it in a `with` block.

    Raises:
        SessionRefused: the session is ending, or past its deadline.
    """

    def __init__(self, session: OpenSession) -> None:
        self.session = session
        self._loop = asyncio.get_running_loop()
        self._aborted: asyncio.Future[str] = self._loop.create_future()
        self._reserved = 0
        name = session.record.session_id
        with session.change:
            if session.ending:
                raise SessionRefused(f"session {name!r} is closed or closing; it takes no further turn")
            if session.time_left is not None and session.time_left <= 0:
                raise SessionRefused(
                    f"session {name!r} is past its deadline of {session.limits.deadline_s:g} s; it takes no "
                    "further turn"
                )
            session.turns.add(self)

    def __enter__(self) -> TurnUnderWay:
        return self

    def __exit__(self, *_: object) -> None:
        session = self.session
        with session.change:
            session.turns.discard(self)
            session.reserved -= self._reserved
            self._reserved = 0
            session.last_used = time.monotonic()
            session.change.notify_all()

    def reserve(self, choices: int) -> int | None:
        """Claim `choices` turns of the session; returns the tokens that each may have, None for no bound.

        Raises:
            SessionRefused: turns or tokens are used up.
        """
        limits, record = self.session.limits, self.session.record
        with self.session.change:
            used = len(record.turns) + self.session.reserved
            if limits.max_turns is not None and used + choices > limits.max_turns:
                raise SessionRefused(
                    f"session {record.session_id!r} may have {limits.max_turns} turns, and {used} are used or "
                    f"under way: there is no room for {choices} more"
                )
            tokens = None
            if limits.max_tokens is not None:
                sampled = sum(turn.sample.length for turn in record.turns)
                tokens = (limits.max_tokens - sampled) // choices
                if tokens < 1:
                    raise SessionRefused(
                        f"session {record.session_id!r} may sample {limits.max_tokens} tokens, and {sampled} are "
                        f"used: none is left for {choices} more turns"
                    )
            self.session.reserved += choices
            self._reserved += choices
        return tokens

    async def sample(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when the session ends or reaches its deadline.

        Raises:
            SessionRefused: the session ended first.
        """
        working = asyncio.ensure_future(work)
        try:
            left = self.session.time_left
            await asyncio.wait({working, self._aborted}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            name = repr(self.session.record.session_id)
            if self._aborted.done():
                raise SessionRefused(f"session {name}: {self._aborted.result()}; the turn is aborted")
            limit = self.session.limits.deadline_s
            raise SessionRefused(f"session {name} has reached its deadline of {limit:g} s; the turn is aborted")
        finally:
            working.cancel()

    def recorded(self, record: Callable[[RecordedSession], T]) -> T:
        """What `record` returns, if the session has not been ended meanwhile; a reserved turn becomes a real one.

        Raises:
            SessionRefused: the session ended first.
        """
        session = self.session
        with session.change:
            if self._aborted.done() or self not in session.turns:
                raise SessionRefused(f"session {session.record.session_id!r} is closed; the turn is not recorded")
            made = record(session.record)
            self._reserved -= 1
            session.reserved -= 1
            return made

    def abort(self, reason: str) -> None:
        """End what `sample` waits for; from any thread."""

        def tell() -> None:
            if not self._aborted.done():
                self._aborted.set_result(reason)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell)
        self.session.turns.discard(self)
