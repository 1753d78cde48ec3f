"""Every wait of the controller on its workers: ended by a standstill, by a loss, and never by a clock alone.

A wait lasts as long as something moves: tokens, rows, bytes (`rlhf_core.note_progress`). While it lasts, all
workers of the run are asked for their pulse, so that whoever waits hears of a lost one within seconds, whatever it
waits for. When nothing has moved for a while, the log says where each worker stands; when nothing has moved for
`limit_s`, the wait ends and names who is late.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlhf_core import DeadlineExceeded, EngineDiedError, RLHFError, noted_progress

from rlhf_launch.workers.clock import Clock, WallClock
from rlhf_launch.workers.handles import Handle
from rlhf_launch.workers.pulse import Pulse

T = TypeVar("T")
_log = logging.getLogger(__name__)

LIMIT_S = 1800.0
_POLL_S = 2.0
_REPORT_S = 60.0
_SILENT_S = 5.0
_LOSS_S = 3.0
OnLost = Callable[[EngineDiedError], None]


class WorkerLostError(EngineDiedError):
    """A worker without which the run cannot go on is gone: a training rank, or the cluster itself."""


@dataclass(slots=True)
class _Watched:
    """What is known of a worker."""

    handle: Handle
    on_lost: OnLost | None
    asked: Future[Any] | None = None
    asked_at: float = 0.0
    pulse: Pulse | None = None
    moved_at: float | None = None
    """When the progress that it tells grew for the last time; None before two pulses were compared."""
    lost: bool = False

    def describe(self, now: float) -> str:
        """Where the worker stands."""
        if self.pulse is None:
            text = f"{self.handle.name} has not answered yet"
        else:
            amounts = ", ".join(f"{amount:,} {what}" for what, amount in self.pulse.progress.items() if amount)
            text = f"{self.handle.name}: {self.pulse.doing}; done so far: {amounts or 'nothing'}"
            if self.pulse.stack:
                text += f"; at {self.pulse.stack}"
        if self.asked is not None and now - self.asked_at > _SILENT_S:
            text += f"; it has not answered for {now - self.asked_at:.0f} s"
        return text


@dataclass(slots=True)
class _Standstill:
    """Since when nothing has moved of what a wait is for."""

    since: float
    reported: float = 0.0
    own: Mapping[str, int] = field(default_factory=noted_progress)


@dataclass(frozen=True, slots=True)
class _Wait:
    """What is waited for, as messages need it."""

    what: str | Callable[[], str]
    late: Sequence[Handle] | None
    done: int
    calls: int

    def describe(self) -> str:
        text = self.what() if callable(self.what) else self.what
        return text + (f"; {self.done} of {self.calls} calls returned" if self.calls > 1 else "")


class Waits:
    """Waits on the workers of one run. Any thread may wait; see the module.

    Args:
        limit_s: a wait ends when nothing that it is for has moved for so many seconds.
        report_s: after so many seconds of standstill, and at every doubling, the log says where workers stand.
        clock: of the controller.
    """

    def __init__(
        self, limit_s: float = LIMIT_S, *, report_s: float = _REPORT_S, clock: Clock | None = None
    ) -> None:
        self.limit_s = limit_s
        self.clock: Clock = clock or WallClock()
        self._report_s = min(report_s, limit_s / 2)
        self._poll_s = min(_POLL_S, limit_s / 4)
        self._watched: dict[int, _Watched] = {}
        self._lock = threading.Lock()
        self._polling = threading.Lock()
        self._fatal: Future[Any] = Future()
        self.rescue: Callable[[], bool] | None = None
        """Asked at the end of a wait that is for no worker by name: whether what stood still was ended, so that the
        wait may go on."""

    # ------------------------------------------------------------ the workers

    def watch(self, handles: Iterable[Handle], on_lost: OnLost | None = None) -> None:
        """Take the pulse of these workers from now on.

        Args:
            handles: the workers.
            on_lost: is told of the loss of one; without it, the loss of one ends every wait.
        """
        with self._lock:
            for handle in handles:
                self._watched[id(handle)] = _Watched(handle, on_lost)

    def leave(self, handles: Iterable[Handle]) -> None:
        """Take no more notice of these workers: they are being closed."""
        with self._lock:
            for handle in handles:
                self._watched.pop(id(handle), None)

    def fail(self, error: RLHFError) -> None:
        """End every wait, now and later, with an error; the first one counts. Any thread may call this."""
        with self._lock:
            if not self._fatal.done():
                self._fatal.set_exception(error)

    # ------------------------------------------------------------ the waits

    def gather(
        self,
        calls: Sequence[Future[T]],
        *,
        what: str | Callable[[], str],
        workers: Sequence[Handle] | None = None,
    ) -> list[T]:
        """Results of calls, in order. The first failure is raised at once, without waiting for the others.

        Args:
            calls: calls under way.
            what: what is awaited, for messages; a function is asked when there is one to write.
            workers: whose calls these are, one each; by default the wait is for whatever any worker, or this
                process itself, gets done.

        Raises:
            DeadlineExceeded: nothing that the calls are for has moved for `limit_s`; names who is late, and where
                each of them stands.
            WorkerLostError: a worker is gone that the run cannot do without, whether or not one of the calls is
                its own.
        """
        still = _Standstill(self.clock.now())
        next_poll = still.since + self._poll_s
        while pending := self._pending(calls, workers):
            now = self.clock.now()
            if now >= next_poll:
                self._poll(now)
                next_poll = now + self._poll_s
                late = [workers[calls.index(call)] for call in pending] if workers is not None else None
                self._judge(still, _Wait(what, late, len(calls) - len(pending), len(calls)))
            self.clock.wait([*pending, self._fatal], max(0.0, next_poll - self.clock.now()))
        return [call.result() for call in calls]

    def run(self, work: Coroutine[Any, Any, T], *, what: str | Callable[[], str]) -> T:
        """Run a coroutine to its end on a thread of its own; what ends the wait also ends the coroutine.

        Raises:
            DeadlineExceeded: neither a worker nor this process has got anything done for `limit_s`.
            WorkerLostError: see `gather`.
        """
        thread = self.clock.loop_thread("coroutine")
        try:
            return self.gather([thread.start(work)], what=what)[0]
        finally:
            thread.close()

    def call_all(self, handles: Sequence[Handle], method: str, *args: Any, what: str) -> list[Any]:
        """Results of the same call on every worker, made at once; see `gather`."""
        return self.gather([handle.call(method, *args) for handle in handles], what=what, workers=handles)

    def settle(self, calls: Sequence[Future[Any]], *, at_most_s: float) -> None:
        """Wait until all calls have ended, however they do; for so many seconds at most."""
        give_up_at = self.clock.now() + at_most_s
        while (pending := [call for call in calls if not call.done()]) and self.clock.now() < give_up_at:
            self.clock.wait(pending, give_up_at - self.clock.now())

    # ------------------------------------------------------------ inside

    def _pending(self, calls: Sequence[Future[Any]], workers: Sequence[Handle] | None) -> list[Future[Any]]:
        """The calls without a result; raises what the first failed one, or the run as a whole, has failed with."""
        for call in calls:
            if call.done() and (error := call.exception()) is not None:
                if workers is not None and not isinstance(error, RLHFError):
                    self._look_for_loss(error)
                raise error
        pending = [call for call in calls if not call.done()]
        if pending and self._fatal.done() and (error := self._fatal.exception()) is not None:
            raise error
        return pending

    def _look_for_loss(self, error: BaseException) -> None:
        """Raise the loss of a worker, if that may be what another one has failed of.

        The peers of a rank that dies fail first: their connections break before anyone has noticed its end.
        """
        give_up_at = self.clock.now() + _LOSS_S
        while not self._fatal.done() and (left := give_up_at - self.clock.now()) > 0:
            self._poll(self.clock.now())
            self.clock.wait([self._fatal], min(left, _LOSS_S / 10))
        if self._fatal.done() and isinstance(loss := self._fatal.exception(), WorkerLostError):
            raise loss from error

    def _poll(self, now: float) -> None:
        """Read the pulses that have come, and ask for new ones; nothing if another thread is at it."""
        if not self._polling.acquire(blocking=False):
            return
        try:
            with self._lock:
                watched = list(self._watched.values())
            self._ask(watched, now)
        finally:
            self._polling.release()

    def _ask(self, watched: Sequence[_Watched], now: float) -> None:
        for worker in watched:
            if worker.asked is not None and worker.asked.done():
                self._read(worker, worker.asked, now)
                worker.asked = None
            if worker.asked is None and not worker.lost:
                try:
                    worker.asked, worker.asked_at = worker.handle.pulse(), now
                except EngineDiedError as error:
                    self._lose(worker, error)

    def _read(self, worker: _Watched, answer: Future[Any], now: float) -> None:
        error = answer.exception()
        if isinstance(error, EngineDiedError):
            self._lose(worker, error)
        elif error is not None:
            _log.debug("%s gave no pulse: %s", worker.handle.name, error)
        else:
            pulse = answer.result()
            if worker.pulse is not None and pulse.progress != worker.pulse.progress:
                worker.moved_at = now
            worker.pulse = pulse

    def _lose(self, worker: _Watched, error: EngineDiedError) -> None:
        worker.lost = True
        with self._lock:
            expected = self._watched.get(id(worker.handle)) is not worker
        if expected:
            return
        if worker.on_lost is not None:
            worker.on_lost(error)
        else:
            self.fail(WorkerLostError(f"{worker.handle.name} is lost: {error}"))

    def _judge(self, still: _Standstill, wait: _Wait) -> None:
        """Report a standstill, and end the wait after too long a one."""
        now = self.clock.now()
        concerned = self._concerned(wait.late)
        moved = [worker.moved_at for worker in concerned if worker.moved_at is not None]
        if wait.late is None and (own := noted_progress()) != still.own:
            still.own = own
            moved.append(now)
        still.since = max([still.since, *moved])
        stood = now - still.since
        if stood < self._report_s:
            still.reported = 0.0
            return
        if stood <= self.limit_s and stood < 2 * still.reported:
            return
        still.reported = stood
        where = "".join(f"\n  {worker.describe(now)}" for worker in concerned)
        if stood > self.limit_s:
            if wait.late is None and self.rescue is not None and self.rescue():
                _log.warning("nothing has moved for %.0f s: ended what stood still. It stood:%s", stood, where)
                still.since = now
                return
            raise DeadlineExceeded(
                f"nothing has moved for {stood:.3g} s while waiting for {wait.describe()}. Where the workers stand:"
                f"{where}\nIf this is healthy, raise placement.timeout_s, which is how long nothing may move"
            )
        _log.warning(
            "nothing has moved for %.0f s while waiting for %s; the run gives up at %.0f s. The workers stand:%s",
            *(stood, wait.describe(), self.limit_s, where),
        )

    def _concerned(self, late: Sequence[Handle] | None) -> list[_Watched]:
        """What is known of those who are late; of everyone, if the wait is for no one by name."""
        with self._lock:
            everyone = list(self._watched.values())
        if late is None:
            return everyone
        names = {id(handle) for handle in late}
        return [worker for worker in everyone if id(worker.handle) in names]
