"""A virtual clock for a run's controller: hours pass in seconds, and twice the same way.

One thing runs at any time. Coroutines share one event loop, whose time jumps to the next timer when nothing is
ready. Code that blocks (the loop of a run, the replacement of an engine) has threads of its own, and a baton: the
event loop stands still while such a thread runs, and goes on when the thread waits or ends. Nothing depends on the
machine, so that a fault found with some seed is found again with it.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from weakref import WeakSet

from rlhf_launch.workers.coroutines import LoopThread

T = TypeVar("T")

_RESOLUTION_S = 1e-9


class Deadlock(RuntimeError):
    """Everyone waits, and nothing is left that could happen."""


class _Jump:
    """In the place of a selector: waiting takes no time, and the clock says that it did."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            self._loop.deadlock()
        elif timeout > 0:
            self._loop.pass_by(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time is counted in `seconds`, and passes only between events."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.deadlock: Callable[[], None] = lambda: None
        """Called when nothing is ready and no timer is left."""
        self._selector = _Jump(self)
        self._clock_resolution = _RESOLUTION_S

    def pass_by(self, seconds: float) -> None:
        """Let time pass: by the smallest number at least that changes it, else the next timer is never reached."""
        self.seconds += max(seconds, math.ulp(self.seconds))
        self._clock_resolution = max(_RESOLUTION_S, 2 * math.ulp(self.seconds))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self.seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run the function here and now: it takes no time, and must not wait."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none: nothing comes from outside."""

    def _write_to_self(self) -> None:
        """Nobody sleeps who had to be woken."""


class _Runner:
    """A thread that blocks, with the baton it is given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.may_run = threading.Semaphore(0)
        self.waits_for: str | None = None
        self.ended = False


class VirtualClock:
    """The clock, waits, locks and threads of a simulated controller; see `rlhf_launch.workers.clock.Clock`.

    >>> clock = VirtualClock()
    >>> def wait_an_hour():
    ...     clock.wait([], 3600)
    ...     return clock.now()
    >>> clock.run(wait_an_hour)
    3600.0
    """

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.loop.deadlock = self._deadlock
        self._loop_turn = threading.Semaphore(0)
        self._runners: dict[int, _Runner] = {}
        self._sleepers: dict[Future[Any], list[Callable[[], None]]] = {}
        self._watched: WeakSet[Future[Any]] = WeakSet()
        self._stuck: BaseException | None = None
        """Why nothing goes on."""
        self._closing = False

    def run(self, work: Callable[[], T]) -> T:
        """Run blocking code to its end, and the event loop beside it; call it once.

        Raises:
            Deadlock: the code waits for what can never happen; names who waits for what.
        """
        done = self._start_runner("main", work)
        done.add_done_callback(self._stop_soon)
        try:
            self.loop.run_forever()
            if not done.done():
                raise self._stuck or RuntimeError("the simulated run was interrupted")
            return done.result()
        finally:
            self._close()

    def stop(self, reason: BaseException) -> None:
        """End everything at this moment, as if the process were killed; `run` raises the reason."""
        if not self._closing:
            self._stuck = self._stuck or reason
            self.loop.stop()

    @property
    def over(self) -> bool:
        """Whether nothing happens any more but the end of what waits."""
        return self._stuck is not None

    # ------------------------------------------------------------ the protocol

    def now(self) -> float:
        """See Clock."""
        return self.loop.seconds

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        """See Clock. From a thread of this clock only."""
        if self._stuck is not None:
            raise self._stuck
        if any(future.done() for future in futures) or timeout_s <= 0:
            return
        runner = self._runners.get(threading.get_ident())
        if runner is None:
            raise RuntimeError("a coroutine of the simulation blocks: await instead, or use in_thread")
        awake = False

        def wake() -> None:
            nonlocal awake
            if not awake:
                awake = True
                self.loop.call_soon(self._hand_to, runner)

        timer = self.loop.call_later(timeout_s, wake) if timeout_s < math.inf else None
        for future in futures:
            self._sleepers.setdefault(future, []).append(wake)
            if future not in self._watched:
                self._watched.add(future)
                future.add_done_callback(self._wake_sleepers)
        runner.waits_for = f"{len(futures)} call(s)"
        self._give_back(runner)
        runner.waits_for = None
        if timer is not None:
            timer.cancel()
        for future in futures:
            if (left := self._sleepers.get(future)) is not None:
                left.remove(wake)
                if not left:
                    del self._sleepers[future]

    def lock(self) -> AbstractContextManager[Any]:
        """See Clock."""
        return _VirtualLock(self)

    def loop_thread(self, name: str) -> LoopThread:
        """See Clock."""
        return _VirtualThread(self)

    async def in_thread(self, run: Callable[[], None]) -> None:
        """See Clock."""
        await asyncio.wrap_future(self._start_runner("beside the loop", run))

    # ------------------------------------------------------------ the baton

    def _start_runner(self, name: str, work: Callable[[], T]) -> Future[T]:
        """A thread that runs the work when its turn comes first."""
        runner, done = _Runner(name), Future()
        done.set_running_or_notify_cancel()  # it ends when it has run: nobody can take that back

        def body() -> None:
            self._runners[threading.get_ident()] = runner
            runner.may_run.acquire()
            try:
                if self._stuck is not None:
                    raise self._stuck
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            finally:
                runner.ended = True
                del self._runners[threading.get_ident()]
                self._loop_turn.release()

        threading.Thread(target=body, name=f"simulated {name}", daemon=True).start()
        self.loop.call_soon(self._hand_to, runner)
        return done

    def _hand_to(self, runner: _Runner) -> None:
        """On the loop: let a thread run until it waits or ends."""
        if runner.ended:
            return
        runner.may_run.release()
        self._loop_turn.acquire()

    def _give_back(self, runner: _Runner) -> None:
        """On a thread: let the loop go on until it is this thread's turn again."""
        self._loop_turn.release()
        runner.may_run.acquire()
        if self._stuck is not None:
            raise self._stuck

    def _stop_soon(self, done: object) -> None:
        if not self._closing:
            self.loop.call_soon(self.loop.stop)

    def _wake_sleepers(self, future: Future[Any]) -> None:
        for wake in self._sleepers.get(future, ()):
            wake()

    def _deadlock(self) -> None:
        waiting = "; ".join(f"{runner.name} waits for {runner.waits_for}" for runner in self._runners.values())
        self.stop(Deadlock(f"at {self.now():.3f} s nothing is left that could happen: {waiting or 'all is idle'}"))

    def _close(self) -> None:
        """End what is left: coroutines, and threads that still wait."""
        self._closing = True
        self._stuck = self._stuck or Deadlock("the simulation is over")
        for runner in list(self._runners.values()):
            self._hand_to(runner)
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()


class _VirtualLock:
    """A lock that is passed on in the order in which it was asked for."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._held = False
        self._queue: list[Future[None]] = []

    def __enter__(self) -> None:
        if self._held:
            turn: Future[None] = Future()
            self._queue.append(turn)
            self._clock.wait([turn], math.inf)
        self._held = True

    def __exit__(self, *error: object) -> None:
        if self._queue:
            self._queue.pop(0).set_result(None)  # it stays held: by the next one
        else:
            self._held = False


class _VirtualThread(LoopThread):
    """Coroutines of one owner on the clock's loop: they are cancelled together."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._loop = clock.loop
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._open = True

    @property
    def running(self) -> bool:
        """See LoopThread."""
        return self._open

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """See LoopThread."""
        return asyncio.run_coroutine_threadsafe(self._kept(work), self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """See LoopThread."""
        return self._result(self.start(work))

    def cancel_all(self) -> None:
        """See LoopThread."""
        if not self._clock.over:
            self._result(asyncio.run_coroutine_threadsafe(self._cancelled(), self._loop))

    def close(self) -> None:
        """See LoopThread."""
        if self._open:
            self.cancel_all()
            self._open = False

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        if (task := asyncio.current_task()) is None:
            raise RuntimeError("a coroutine runs outside any task")
        self._tasks[task] = None
        try:
            return await work
        finally:
            del self._tasks[task]

    async def _cancelled(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _result(self, future: Future[T]) -> T:
        self._clock.wait([future], math.inf)
        return future.result()
