"""The thread that owns a decoder: a token for every running sample per step, and commands between two steps.

So a pause never cuts through a step and no token comes from a mixture of weights.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

from rlhf_core import EngineDiedError, GenerationRequest, GenerationResult, note_progress

from rlhf_rollout.backends.transformers.decoder import Decoder, Draw, SeparateDecoder


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A request with its samples and the future that its caller waits on."""

    request: GenerationRequest
    draws: tuple[Draw, ...]
    future: Future[GenerationResult]

    @property
    def finished(self) -> bool:
        return all(draw.finish_reason for draw in self.draws)


class DecodingLoop:
    """Runs a decoder on a thread of its own. `add`, `between_steps`, `resume` and `close` may be called from any
    thread; the others belong to commands, which `between_steps` runs.

    Args:
        decoder: the model with its running samples.
        max_draws: samples that run at the same time; the others wait.
    """

    def __init__(self, decoder: Decoder | SeparateDecoder, *, max_draws: int) -> None:
        self.decoder = decoder
        self.version = 0
        """What tokens are sampled with; changed by commands."""
        self._max_draws = max_draws
        # Shared with the thread, guarded by `_changed`:
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._tickets: list[_Ticket] = []
        self._waiting: deque[Draw] = deque()
        self._paused = False
        self._refusal: Exception | None = None
        """Why requests are refused: stale weights, a dead thread, or closed."""
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="transformers-rollout", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ from any thread

    def add(self, request: GenerationRequest, draws: Sequence[Draw]) -> Future[GenerationResult]:
        """Start the samples of a request; cancelling the future ends them.

        Raises:
            EngineDiedError: the thread has ended.
            StaleWeightsError: or whatever else `refuse` was given.
        """
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            ticket = _Ticket(request, tuple(draws), Future())
            self._tickets.append(ticket)
            self._waiting.extend(draws)
            self._changed.notify_all()
        return ticket.future

    def between_steps(self, call: Callable[[], None]) -> Future[None]:
        """Run something on the thread when no step is under way."""
        future: Future[None] = Future()
        with self._changed:
            if self._closed or not self._thread.is_alive():
                raise self._refusal or EngineDiedError("the transformers backend is closed")
            self._calls.append((call, future))
            self._changed.notify_all()
        return future

    def resume(self) -> None:
        """Go on sampling after a pause."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; requests still running raise EngineDiedError. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # ------------------------------------------------------------ commands

    @property
    def refuses(self) -> bool:
        """Whether requests are refused."""
        return self._refusal is not None

    def pause(self, *, abort: bool) -> None:
        """Take no further step until `resume`; with `abort`, end all requests now with the tokens they have."""
        with self._changed:
            self._paused = True
            if not abort:
                return
            for draw in (draw for ticket in self._tickets for draw in ticket.draws):
                draw.finish_reason = draw.finish_reason or "abort"
            self._waiting.clear()
        self.decoder.keep([])
        self._deliver()

    def refuse(self, error: Exception) -> None:
        """End all requests with `error`, and refuse new ones until `accept`."""
        with self._changed:
            self._refusal = error
            for ticket in self._tickets:
                _settle(ticket.future, error)
            self._tickets.clear()
            self._waiting.clear()
            self.decoder.keep([])

    def accept(self) -> None:
        """Take requests again after `refuse`."""
        with self._changed:
            self._refusal = None

    # ------------------------------------------------------------ the thread

    def _main(self) -> None:
        error: Exception = EngineDiedError("the transformers backend was closed")
        try:
            while self._turn():
                pass
        except BaseException as cause:
            error = EngineDiedError(f"the transformers backend died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        self.refuse(error)
        with self._changed:
            for _, future in self._calls:
                _settle(future, error)

    def _turn(self) -> bool:
        """Wait for work, then carry out the calls and one sampling step. False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._calls or self._can_sample())
            if self._closed:
                return False
            calls = list(self._calls)
            self._calls.clear()
        for call, future in calls:
            try:
                call()
                _settle(future, None)
            except Exception as error:
                _settle(future, error)
        if self._can_sample():
            self._drop_cancelled()
            joining = self._admit()
            if joining or self.decoder.draws:
                self.decoder.step(joining, version=self.version)
                note_progress("decoding steps")
            self._deliver()
        return True

    def _can_sample(self) -> bool:
        return not self._paused and bool(self._waiting or self.decoder.draws)

    def _admit(self) -> list[Draw]:
        with self._changed:
            room = self._max_draws - len(self.decoder.draws)
            joining = self.decoder.next_joining(self._waiting, room)
            return [self._waiting.popleft() for _ in range(joining)]

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = {id(d) for ticket in self._tickets if ticket.future.cancelled() for d in ticket.draws}
            if gone:
                self._tickets = [ticket for ticket in self._tickets if not ticket.future.cancelled()]
                self._waiting = deque(draw for draw in self._waiting if id(draw) not in gone)
                self.decoder.keep(draw for draw in self.decoder.draws if id(draw) not in gone)

    def _deliver(self) -> None:
        with self._changed:
            finished = [ticket for ticket in self._tickets if ticket.finished]
            self._tickets = [ticket for ticket in self._tickets if not ticket.finished]
        for ticket in finished:
            result = GenerationResult(
                request_id=ticket.request.request_id,
                samples=tuple(draw.sample() for draw in ticket.draws),
                meaning=ticket.request.sampling.meaning,
            )
            _settle(ticket.future, result)


def _settle(future: Future[Any], outcome: object) -> None:
    """Hand over a result or an error; a caller that has gone away (cancelled) no longer wants it."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
