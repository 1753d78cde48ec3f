"""A rollout engine over several hosts, called as one worker: the loss of a part is the loss of the engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from rlhf_core import EngineDiedError

from rlhf_launch.workers.handles import Handle
from rlhf_launch.workers.pulse import Pulse
from rlhf_launch.workers.waits import WorkerLostError


class SpreadHandle:
    """A Handle of an engine (`RolloutWorker`) that brings its parts up and down with it (`RolloutPart`).

    A part that is gone is not noticed by all that wait for it: the engine's own process may be in a collective with
    it. So once a part is lost, every call fails with its name, and the engine's process and the other parts are
    ended.

    Args:
        main: the engine, on its host 0.
        parts: those on its other hosts, in order.
    """

    def __init__(self, main: Handle, parts: Sequence[Handle]) -> None:
        self.name = main.name
        self._main = main
        self._parts = tuple(parts)
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._under_way: set[Future[Any]] = set()
        self._lost: BaseException | None = None
        self._closing = False

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Handle."""
        outcome = self._begun()
        if not outcome.done():
            if method == "start":
                self._start(outcome)
            else:
                self._pass_on(self._main.call(method, *args, **kwargs), outcome)
        return outcome

    def pulse(self) -> Future[Pulse]:
        """See Handle; that of the engine's own process."""
        if self._lost is not None:
            raise EngineDiedError(str(self._lost))
        return self._main.pulse()

    def begin_close(self) -> Future[Any]:
        """See Handle."""
        with self._lock:
            self._closing = True
        closed: Future[Any] = Future()
        closed.set_running_or_notify_cancel()
        closing = [] if self._lost is not None else [handle.begin_close() for handle in (self._main, *self._parts)]
        left = [len(closing)]

        def count(_: Future[Any]) -> None:
            with self._lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                closed.set_result(None)

        for one in closing:
            one.add_done_callback(count)
        if not closing:
            closed.set_result(None)
        return closed

    def end(self) -> None:
        """See Handle."""
        with self._lock:
            self._closing = True
        self._end_all()

    def _begun(self) -> Future[Any]:
        """The future of a call, which has failed already where a part is lost."""
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()
        with self._lock:
            if self._lost is None:
                self._under_way.add(outcome)
                return outcome
        outcome.set_exception(self._lost)
        return outcome

    def _start(self, outcome: Future[Any]) -> None:
        """Bring all up, at a place that the engine's process names."""

        def meet(asked: Future[str]) -> None:
            if (error := asked.exception()) is not None:
                self._settle(outcome, error=error)
                return
            meeting = asked.result()
            try:
                for part in self._parts:
                    self._attend(part, part.call("start", meeting))
                self._pass_on(self._main.call("start", meeting), outcome)
            except Exception as error:  # one of them is closed meanwhile
                self._settle(outcome, error=error)

        self._main.call("meeting").add_done_callback(meet)

    def _attend(self, part: Handle, started: Future[Any]) -> None:
        """Notice it when a part does not start, or ends."""

        def ended(done: Future[Any]) -> None:
            if (error := done.exception()) is not None:
                self._lose(part, error)

        def up(done: Future[Any]) -> None:
            if (error := done.exception()) is not None:
                self._lose(part, error)
                return
            with suppress(Exception):  # closed meanwhile
                part.call("wait").add_done_callback(ended)

        started.add_done_callback(up)

    def _lose(self, part: Handle, error: BaseException) -> None:
        with self._lock:
            if self._closing or self._lost is not None:
                return
            # Not every error is of its part: the cluster may be gone, or the model refused.
            self._lost = error
            if isinstance(error, EngineDiedError) and not isinstance(error, WorkerLostError):
                self._lost = EngineDiedError(f"{self.name} has lost its part {part.name}: {error}")
                self._lost.__cause__ = error
            given_up, self._under_way = self._under_way, set()
        for outcome in given_up:
            outcome.set_exception(self._lost)
        # The cluster tells of a loss on the thread that it needs itself to end a worker.
        threading.Thread(target=self._end_all, name=f"end-{self.name}", daemon=True).start()

    def _end_all(self) -> None:
        with self._ending:
            for handle in (self._main, *self._parts):
                handle.end()

    def _pass_on(self, done: Future[Any], outcome: Future[Any]) -> None:
        def settle(done: Future[Any]) -> None:
            self._settle(outcome, done)

        done.add_done_callback(settle)

    def _settle(
        self, outcome: Future[Any], done: Future[Any] | None = None, *, error: BaseException | None = None
    ) -> None:
        with self._lock:
            if outcome not in self._under_way:
                return
            self._under_way.discard(outcome)
        error = error or (done.exception() if done is not None else None)
        if error is not None:
            outcome.set_exception(error)
        elif done is not None:
            outcome.set_result(done.result())
