"""Rows of many requests scored together: by tokens, with a bounded wait, in one thread that has the model."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rlhf_core import ConfigError, RLHFError

Rows = Sequence[Sequence[int]]
ScoreRows = Callable[[Rows], Sequence[float]]


class QueueFullError(RLHFError):
    """More waits already than may; `retry_after_s` says when it is worth asking again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerClosingError(RLHFError):
    """The server is about to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """How requests are joined, and how many may wait."""

    max_batch_tokens: int = 16384
    """A batch is full with so many tokens; a larger request is a batch of its own."""
    wait_s: float = 0.01
    """How long the first request of a batch waits for others."""
    max_waiting_tokens: int = 1 << 20
    """Tokens that may wait; a request beyond them is refused, unless nothing waits."""

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1 or self.max_waiting_tokens < 1 or not 0 <= self.wait_s < math.inf:
            raise ConfigError(
                "serve-rm: --max-batch-tokens and --max-waiting-tokens must be at least 1, --max-wait-ms at least "
                f"0, got {self.max_batch_tokens}, {self.max_waiting_tokens} and {1000 * self.wait_s:g}"
            )


@dataclass(kw_only=True, slots=True, eq=False)
class _Request:
    rows: Rows
    tokens: int
    arrived: float
    future: Future[list[float]]


class BatchedRows:
    """Calls a scorer from a thread of its own, with the rows of several requests at a time.

    Requests are taken in the order of their arrival and never split. One that is cancelled before its batch begins
    costs nothing.
    """

    def __init__(self, score: ScoreRows, limits: BatchLimits) -> None:
        """`score` gives a number for each row, and may take any number of rows."""
        self._score, self._limits = score, limits
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._tokens = 0
        self._closing = False
        self._tokens_per_s = 0.0
        self.batches = 0
        """Calls of the scorer so far."""
        self._thread = threading.Thread(target=self._work, name="reward model", daemon=True)
        self._thread.start()

    def submit(self, rows: Rows) -> Future[list[float]]:
        """Queue the rows of a request; the scores come in their order.

        Raises:
            QueueFullError: too many tokens wait.
            ServerClosingError: after `close`.
        """
        tokens = sum(map(len, rows))
        with self._changed:
            if self._closing:
                raise ServerClosingError("the server is ending")
            if self._tokens and self._tokens + tokens > self._limits.max_waiting_tokens:
                raise QueueFullError(
                    f"{self._tokens} tokens wait already, {self._limits.max_waiting_tokens} at most may",
                    self._retry_after_s(),
                )
            request = _Request(rows=rows, tokens=tokens, arrived=time.monotonic(), future=Future())
            self._waiting.append(request)
            self._tokens += tokens
            self._changed.notify()
        request.future.add_done_callback(lambda future: self._left(request) if future.cancelled() else None)
        return request.future

    @property
    def waiting(self) -> int:
        """Requests that wait for a batch."""
        return len(self._waiting)

    def close(self) -> None:
        """Score what waits, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _left(self, request: _Request) -> None:
        """Give the place of a cancelled request back."""
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
                self._tokens -= request.tokens
                self._changed.notify()

    def _retry_after_s(self) -> int:
        if not self._tokens_per_s:
            return 1
        return max(1, min(60, math.ceil(self._tokens / self._tokens_per_s)))

    def _work(self) -> None:
        while batch := self._take():
            requests = [request for request in batch if request.future.set_running_or_notify_cancel()]
            if requests:
                self._serve(requests)

    def _serve(self, requests: Sequence[_Request]) -> None:
        begun = time.monotonic()
        rows = [row for request in requests for row in request.rows]
        try:
            scores = list(self._score(rows))
        except BaseException as error:
            for request in requests:
                request.future.set_exception(error)
            return
        self.batches += 1
        speed = sum(request.tokens for request in requests) / max(time.monotonic() - begun, 1e-6)
        self._tokens_per_s = 0.7 * self._tokens_per_s + 0.3 * speed if self._tokens_per_s else speed
        start = 0
        for request in requests:
            request.future.set_result(scores[start : start + len(request.rows)])
            start += len(request.rows)

    def _take(self) -> list[_Request]:
        """The next batch; empty at the end."""
        with self._changed:
            while not self._gathered():
                if self._closing:
                    return []
                self._changed.wait()
            taken: list[_Request] = []
            tokens = 0
            while self._waiting and (
                not taken or tokens + self._waiting[0].tokens <= self._limits.max_batch_tokens
            ):
                taken.append(self._waiting.popleft())
                tokens += taken[-1].tokens
            self._tokens -= tokens
            return taken

    def _gathered(self) -> bool:
        """Wait for others as long as the first may wait; whether anything is left by then."""
        if not self._waiting:
            return False
        until = self._waiting[0].arrived + self._limits.wait_s
        while self._waiting and self._tokens < self._limits.max_batch_tokens and not self._closing:
            left = until - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                break
        return bool(self._waiting)
