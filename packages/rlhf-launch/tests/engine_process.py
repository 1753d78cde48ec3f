"""Rollout workers in processes of their own that a test can kill, behind the handles that the launcher uses."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future
from typing import Any

from rlhf_core import EngineDiedError
from rlhf_launch.workers.handles import finished
from rlhf_launch.workers.pulse import Pulse


def serve(pipe: Any, backend: str, config: Any, environment: dict[str, str]) -> None:
    """Runs in the process: carry out calls from the pipe, all at once, until it closes."""
    os.environ.update(environment)
    from rlhf_launch.workers.rollout_engine import RolloutWorker

    worker = RolloutWorker(backend, config, environment)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def run(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = (number, None, await getattr(worker, method)(*arguments))
        except Exception as error:
            answer = (number, error, None)
        pipe.send(answer)

    while True:
        try:
            call = pipe.recv()
        except EOFError:
            os._exit(0)
        asyncio.run_coroutine_threadsafe(run(*call), loop)


class ProcessHandle:
    """See handles.Handle."""

    def __init__(self, name: str, backend: str, config: Any, environment: dict[str, str]) -> None:
        self.name = name
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, backend, config, environment), daemon=True
        )
        self._process.start()
        theirs.close()
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        self._dead = False
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._dead:
                future.set_exception(EngineDiedError(f"{self.name} is dead; {method} was not started"))
                return future
            number = len(self._calls)
            self._calls[number] = (method, future)
            self._pipe.send((number, method, args))
        return future

    def kill(self) -> None:
        """End the process as a crash or the kernel would."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)

    def pulse(self) -> Future[Pulse]:
        if self._dead:
            raise EngineDiedError(f"{self.name} is dead")
        return finished(Pulse())

    def begin_close(self) -> Future[Any]:
        return self.call("close")

    def end(self) -> None:
        if not self._dead:
            self.kill()
        self._process.join(60)

    def _listen(self) -> None:
        while True:
            try:
                number, error, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            future = self._calls[number][1]
            future.set_result(value) if error is None else future.set_exception(error)
        with self._lock:
            self._dead = True
            for method, future in self._calls.values():
                if not future.done():
                    future.set_exception(EngineDiedError(f"{self.name} died during {method}"))
