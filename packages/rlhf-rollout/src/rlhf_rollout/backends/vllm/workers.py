"""Worker processes of a vLLM engine: how many there are, and which of them died."""

from __future__ import annotations

import multiprocessing.connection
import signal
import threading
from typing import TYPE_CHECKING, Any

from rlhf_core import EngineDiedError, shared_memory_id

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_NOTICE_S = 2.0


class WorkerWatch:
    """Notices at once that a worker process has died, and ends the others.

    Those would wait for it in vain. vLLM notices too, but then waits ten seconds for the others to end by
    themselves, and does not say whose death it was.
    """

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._found: str | None = None
        self._thread: threading.Thread | None = None

    def begin(self, engine: LLMEngine) -> None:
        """Watch the workers of an engine; one without worker processes needs none."""
        executor: Any = engine.model_executor
        self._processes = [worker.proc for worker in getattr(executor, "workers", ())]
        if self._processes:
            self._thread = threading.Thread(
                target=self._watch, args=(executor,), name="vllm-worker-watch", daemon=True
            )
            self._thread.start()

    def cause(self) -> str:
        """`worker process VllmWorker-1 was killed by signal 9 (SIGKILL); then: `, or nothing."""
        if self._thread is not None and not all(process.is_alive() for process in self._processes):
            self._thread.join(_NOTICE_S)
        return f"{self._found}; then: " if self._found else ""

    def _watch(self, executor: Any) -> None:
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes])
        # vLLM's own watch may come first; it says that the engine failed before it shuts it down.
        if getattr(executor, "shutting_down", False) and not getattr(executor, "is_failed", False):
            return
        process = next(process for process in self._processes if process.sentinel in ended)
        process.join(_NOTICE_S)
        self._found = f"worker process {process.name} {ending(process.exitcode)}"
        for other in self._processes:
            other.kill()


def ending(exit_code: int | None) -> str:
    """How a process ended, in words: `was killed by signal 9 (SIGKILL)`."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = f" ({signal.Signals(-exit_code).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-exit_code}{name}"


def on_workers(engine: LLMEngine, method: str, *arguments: Any, timeout_s: float) -> tuple[str, str] | None:
    """Call a method of the worker extension on all workers; the first failure, if any.

    Raises:
        EngineDiedError: a worker is gone or the call itself failed.
    """
    try:
        answers = engine.collective_rpc(method, timeout=timeout_s, args=arguments)
    except Exception as error:
        # The workers report their failures as values, so it is the engine that is broken.
        raise EngineDiedError(f"the vLLM engine died: {type(error).__name__}: {error}") from error
    return next((answer for answer in answers if answer is not None), None)


def share_memory(engine: LLMEngine, *, timeout_s: float) -> bool:
    """Whether what this process can map (`shared_memory_id`) is the same for all workers."""
    return {shared_memory_id()} == set(engine.collective_rpc("rlhf_shared_memory", timeout=timeout_s))
