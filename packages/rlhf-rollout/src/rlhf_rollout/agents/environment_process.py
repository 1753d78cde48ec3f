"""Environments in processes of their own: one episode at a time in each, killed at a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf_core import Observation, PluginError, Turn

from rlhf_rollout.agents.config import AgentConfig
from rlhf_rollout.agents.environment_calls import EnvironmentFailed, EnvironmentTooSlow, in_thread
from rlhf_rollout.agents.environment_worker import main
from rlhf_rollout.sandbox.worker_process import WorkerGone, WorkerProcess

START_TIMEOUT_S = 120.0
"""Deadline for a process to import its environment."""


class EnvironmentProcesses:
    """The processes of a run's environments, which are started as they are needed and used again.

    Where `bwrap` works here, a process has a process namespace of its own, so that nothing it starts outlives it;
    elsewhere what leaves its session does.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._setup = {"environment": config.environment, "options": dict(config.environment_options)}
        self._timeout_s = config.step_timeout_s
        self._lock = threading.Lock()
        # A process ends with the thread that started it, where it has a namespace of its own.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="environment processes")
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._closed = False

    def check(self) -> None:
        """Start the first process now.

        Raises:
            PluginError: the environment cannot be imported there, or not called with its options.
        """
        worker = self._start()
        with self._lock:
            self._idle.append(worker)

    def environment(self) -> ProcessEnvironment:
        """An environment for one episode, to be called by one thread at a time; blocks until its process is up."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        made = ProcessEnvironment(worker or self._start(), self._timeout_s, self._give_back)
        made.call("make")
        return made

    def close(self) -> None:
        """End all processes; may be called twice."""
        with self._lock:
            self._closed = True
            workers, self._all, self._idle = list(self._all), set(), []
        for worker in workers:
            worker.kill()
        self._starter.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> WorkerProcess:
        worker = self._starter.submit(WorkerProcess, main.__module__).result()
        with self._lock:
            self._all = {other for other in self._all if other.alive} | {worker}
            closed = self._closed
        if closed:
            worker.kill()
        try:
            kind, content = worker.call(self._setup, START_TIMEOUT_S)
        except WorkerGone as gone:
            raise PluginError(f"agent environment {self._setup['environment']!r} {gone.how}") from None
        if kind != "ready":
            worker.kill()
            raise PluginError(f"agent environment in its process: {content}")
        return worker

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            if not self._closed and worker.alive:
                self._idle.append(worker)


class ProcessEnvironment:
    """Environment whose methods run in another process."""

    def __init__(self, worker: WorkerProcess, timeout_s: float, give_back: Callable[[WorkerProcess], None]) -> None:
        self._worker: WorkerProcess | None = worker
        self._timeout_s = timeout_s
        self._give_back = give_back

    async def reset(self, metadata: Mapping[str, Any]) -> Observation:
        """See Environment."""
        return await self._call_beside("reset", dict(metadata))

    async def step(self, turn: Turn) -> Observation:
        """See Environment."""
        return await self._call_beside("step", turn)

    def close(self) -> None:
        """Close the environment, and leave its process to another episode."""
        worker = self._worker
        if worker is None:
            return
        self.call("close")
        self._worker = None
        self._give_back(worker)

    def call(self, name: str, *arguments: Any) -> Any:
        """Have the other process call a method.

        Raises:
            EnvironmentFailed: the method raised, or its process has ended.
            EnvironmentTooSlow: it did not return in time, and the process was killed.
        """
        worker = self._worker
        if worker is None:
            raise EnvironmentFailed("the environment's process has ended")
        try:
            kind, content = worker.call((name, arguments), self._timeout_s)
        except WorkerGone as gone:
            self._worker = None
            raise (EnvironmentTooSlow if gone.late else EnvironmentFailed)(
                f"the environment's {name} {gone.how}"
            ) from None
        except Exception as error:  # what cannot be sent: the pipe is in order, the episode is not
            raise EnvironmentFailed(
                f"the environment's {name}: {type(error).__name__}: {error}; what goes to an environment in a "
                "process of its own must be what pickle can write"
            ) from error
        if kind == "error":
            raise EnvironmentFailed(content)
        return content

    async def _call_beside(self, name: str, argument: Any) -> Any:
        try:
            return await in_thread(self.call, name, argument)
        except asyncio.CancelledError:  # the episode ends in the middle of a call: the process is of no use
            if self._worker is not None:
                self._worker.kill()
                self._worker = None
            raise


def check_agent(config: AgentConfig) -> None:
    """Refuse an agent that cannot be imported or called, before the first episode.

    Raises:
        PluginError: the environment or the program cannot be imported, or not in a process of its own.
        ConfigError: it cannot be called as it will be, or there is no such command.
    """
    config.check()
    if config.isolate == "process":
        processes = EnvironmentProcesses(config)
        try:
            processes.check()
        finally:
            processes.close()
