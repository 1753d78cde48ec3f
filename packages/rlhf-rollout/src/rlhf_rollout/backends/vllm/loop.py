"""The thread that owns a vLLM engine: it steps while there is work and takes commands between two steps.

Everything that touches the engine runs on this thread. Steps overlap with asynchronous scheduling and between the
stages of a pipeline; a pause, a sleep or a weight update first finishes those in flight and delivers their tokens,
so that all tokens of one step come from one version of the weights, and carry it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core import CapabilityError, EngineDiedError, note_progress

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Any], Any]
    done: Future[Any]


class VLLMLoop:
    """Runs an engine on a thread of its own. The public methods may be called from any thread.

    Args:
        build: makes the engine, on the thread; what it raises is raised by the constructor.
        shut_down: releases the engine, on the thread, at the very end.
        refusals: exceptions by which the engine rejects one request and stays healthy.
        drain: the outputs of steps that the engine has begun and not finished; none if its steps do not overlap.
        admit: changes a prompt at the moment when the engine takes it.
        cause: asked once the engine has failed: text to put before its exception, for instance which worker died.

    Raises:
        EngineDiedError: by every method, once the engine has failed or `stop` was called.
    """

    def __init__(
        self,
        build: Callable[[], LLMEngine],
        shut_down: Callable[[LLMEngine], None],
        *,
        refusals: tuple[type[Exception], ...] = (ValueError, TypeError),
        drain: Callable[[LLMEngine], Iterable[Sequence[Any]]] = lambda engine: (),
        admit: Callable[[Any], Any] = lambda prompt: prompt,
        cause: Callable[[], str] = lambda: "",
    ) -> None:
        self._refusals = refusals
        self._drain = drain
        self._admit = admit
        self._cause = cause
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._stopping = False
        # Those below belong to the thread.
        self._ids = itertools.count()
        self._pending: dict[str, Future[RequestOutput]] = {}
        self._paused = False
        self._refusal: Exception | None = None
        self._fatal: _Command | None = None
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(build, shut_down, ready), name="vllm-engine", daemon=True
        )
        self._thread.start()
        ready.result()

    # ------------------------------------------------------------ from any thread

    def generate(self, prompt: Any, params: SamplingParams, lora_request: Any = None) -> Future[RequestOutput]:
        """Start a request (the arguments are those of vLLM's `add_request`); cancelling the future aborts it."""
        done: Future[RequestOutput] = Future()
        command = _Command(lambda engine: self._add(engine, (prompt, params, lora_request), done), Future())
        command.done.add_done_callback(lambda future: self._resolve(done, error=future.exception()))
        self._post(command)
        return done

    def call(self, run: Callable[[LLMEngine], Any]) -> Future[Any]:
        """Run something on the thread between two steps. If it raises EngineDiedError, the loop ends."""
        command = _Command(run, Future())
        self._post(command)
        return command.done

    def stop(self) -> None:
        """End the thread and release the engine; unfinished requests fail. May be called twice."""
        with contextlib.suppress(EngineDiedError):
            self.call(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: _Command) -> None:
        with self._lock:
            if self._ended is not None:
                raise EngineDiedError(self._ended)
            self._commands.put(command)

    # ------------------------------------------------------------ commands; on the thread, through `call`

    def pause(self, engine: LLMEngine, *, abort: bool) -> None:
        """Take no further step until `resume`; with `abort`, end all requests now with the tokens they have."""
        self.settle(engine)
        self._paused = True
        if abort:
            for request_id, done in list(self._pending.items()):
                self._resolve(done, result=_abort(engine, request_id))
            self._pending.clear()

    def resume(self, engine: LLMEngine) -> None:
        """Go on stepping after a pause."""
        self._paused = False

    def settle(self, engine: LLMEngine) -> None:
        """Finish the steps in flight, and deliver their outputs: their tokens are of the weights of now."""
        for outputs in self._drain(engine):
            self._deliver(outputs)

    def refuse(self, engine: LLMEngine, reason: Exception) -> None:
        """Fail unfinished and later requests with `reason`, until `accept`."""
        self.settle(engine)
        self._refusal = reason
        for request_id, done in list(self._pending.items()):
            _abort(engine, request_id)
            self._resolve(done, error=_again(reason))
        self._pending.clear()

    def accept(self) -> None:
        """Take requests again after `refuse`."""
        self._refusal = None

    # ------------------------------------------------------------ the thread

    def _main(
        self,
        build: Callable[[], LLMEngine],
        shut_down: Callable[[LLMEngine], None],
        ready: Future[None],
    ) -> None:
        try:
            engine = build()
        except BaseException as error:
            self._end("the vLLM engine did not start")
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while not self._stopping:
                if not self._pending:
                    self.settle(engine)  # a step may have been begun before the last token was known
                self._obey(engine)
                if not self._paused and not self._stopping and self._pending:
                    self._deliver(engine.step())
                    note_progress("decoding steps")
            self._end("the vLLM engine was closed")
        except BaseException as error:
            self._end(f"the vLLM engine died: {self._cause()}{type(error).__name__}: {error}", error)
        finally:
            # What fails here has a first cause that was reported above, or is of no interest after a close.
            with contextlib.suppress(Exception):
                shut_down(engine)

    def _obey(self, engine: LLMEngine) -> None:
        """Run the waiting commands; wait for one if there is nothing to step for."""
        idle = self._paused or not self._pending
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get() if idle else self._commands.get_nowait()
                idle = False
                if command.done.set_running_or_notify_cancel():
                    self._run(command, engine)

    def _run(self, command: _Command, engine: LLMEngine) -> None:
        try:
            result = command.run(engine)
        except EngineDiedError as error:
            self._fatal = command
            raise error.__cause__ or error from None
        except Exception as error:
            command.done.set_exception(error)
        else:
            command.done.set_result(result)

    def _add(self, engine: LLMEngine, asked: tuple[Any, SamplingParams, Any], done: Future[RequestOutput]) -> None:
        if done.cancelled():
            return
        if self._refusal is not None:
            self._resolve(done, error=_again(self._refusal))
            return
        request_id = str(next(self._ids))
        prompt, params, lora_request = asked
        try:
            engine.add_request(request_id, self._admit(prompt), params, lora_request=lora_request)
        except self._refusals as error:
            self._resolve(done, error=CapabilityError(f"vLLM refuses the request: {error}"))
            return
        self._pending[request_id] = done
        done.add_done_callback(lambda future: self._cancel(request_id) if future.cancelled() else None)

    def _cancel(self, request_id: str) -> None:
        def drop(engine: LLMEngine) -> None:
            if self._pending.pop(request_id, None) is not None:
                _abort(engine, request_id)

        with contextlib.suppress(EngineDiedError):
            self.call(drop)

    def _deliver(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            if output.finished and (done := self._pending.pop(output.request_id, None)) is not None:
                self._resolve(done, result=output)

    def _resolve(
        self, done: Future[Any], *, result: RequestOutput | None = None, error: BaseException | None = None
    ) -> None:
        # Whoever awaits it may cancel at any moment.
        with contextlib.suppress(InvalidStateError):
            if error is not None:
                done.set_exception(error)
            elif result is not None:
                done.set_result(result)

    def _stop(self, engine: LLMEngine) -> None:
        self._stopping = True

    def _end(self, reason: str, cause: BaseException | None = None) -> None:
        """Refuse everything from now on, and fail what waits."""
        with self._lock:
            self._ended = reason
        waiting = [*self._pending.values(), *([self._fatal.done] if self._fatal else [])]
        self._pending.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                waiting.append(command.done)
        for done in waiting:
            error = EngineDiedError(reason)
            error.__cause__ = cause
            self._resolve(done, error=error)


class _Collector:
    """Stands in for vLLM's per-request output queue, the only place where an aborted request leaves its tokens."""

    output: RequestOutput | None = None

    def put(self, output: RequestOutput) -> None:
        self.output = output


def _abort(engine: LLMEngine, request_id: str) -> RequestOutput | None:
    """Abort a request and return what it has, all of its samples together."""
    collector: Any = _Collector()
    processor = engine.output_processor
    for internal_id in processor.external_req_ids.get(request_id, ()):
        processor.request_states[internal_id].queue = collector
    engine.abort_request([request_id])
    return collector.output


def _again(error: Exception) -> Exception:
    """A fresh exception: one object raised in many tasks would gather all their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
