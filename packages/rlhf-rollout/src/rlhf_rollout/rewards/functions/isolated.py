"""A Python function as a reward in processes of its own, which are killed at the deadline with all they started."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rlhf_core import ConfigError, PluginError, RewardError, RewardFunction, Score, Trajectory, check_scores

from rlhf_rollout.rewards.functions.isolated_worker import main
from rlhf_rollout.rewards.functions.python import PythonReward, RewardTooSlow
from rlhf_rollout.sandbox.worker_process import WorkerGone, WorkerProcess

START_TIMEOUT_S = 120.0
"""Deadline for a worker to import its function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolatedRewardConfig:
    """A function and the processes that run it."""

    function: str
    """`module:function`; see PythonReward for how it is called. Its module is imported in the processes alone."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function, the same in every call."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Parameter of the function: the data's column that it takes, where their names differ."""
    prepare: str | None = None
    """`module:function` without arguments that every process calls before its first batch, outside the deadline:
    to load what takes long."""
    timeout_s: float = 60.0
    """Deadline for the samples of one prompt (one batch)."""
    workers: int = 1
    """Processes, and so batches at the same time; further batches wait."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.workers < 1:
            raise ConfigError(
                f"isolated reward: needs timeout_s > 0 and workers >= 1, got {self.timeout_s} and {self.workers}"
            )


class IsolatedReward:
    """RewardFunction like PythonReward, for functions that may hang, crash, or hold Python's lock.

    A worker is started when it is first needed, and again after it was killed or died. Where `bwrap` works here,
    a worker has a process namespace of its own, so that nothing it starts outlives it; elsewhere what leaves its
    session does.
    """

    def __init__(self, config: IsolatedRewardConfig, *, name: str | None = None) -> None:
        self.name: str = name or config.function
        self._config = config
        self._closed = False
        self._started: list[WorkerProcess] = []
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix=f"reward {config.function}")
        self._idle: queue.SimpleQueue[WorkerProcess | None] = queue.SimpleQueue()
        for _ in range(config.workers):
            self._idle.put(None)

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction.

        Raises:
            RewardError: the function raised, missed its deadline, killed its process, or returned the wrong number
                or kind of scores.
            PluginError: the function cannot be imported, or has the wrong signature.
        """
        if not trajectories:
            return []
        call = self._threads.submit(self._score, list(trajectories), list(texts))
        return await asyncio.wrap_future(call)

    def check(self) -> frozenset[str]:
        """Start the first worker now; returns the columns that the data must have.

        Raises:
            PluginError: the function cannot be imported, or has the wrong signature.
        """
        kept, worker = self._idle.get(), None
        try:
            if kept is not None:
                kept.kill()
            worker, columns = self._start()
        except WorkerGone as gone:
            raise PluginError(f"reward {self.name}: {self._config.function} {gone.how}") from None
        finally:
            self._idle.put(worker)
        return columns

    def close(self) -> None:
        """End the workers; batches still running fail. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._started:
            worker.kill()

    def _score(self, trajectories: list[Trajectory], texts: list[str]) -> list[Score]:
        """Score with an idle worker; runs in a thread of the pool, which has as many as there are workers."""
        worker = self._idle.get()
        try:
            worker = worker or self._start()[0]
            kind, content, sample_ids = worker.call((trajectories, texts), self._config.timeout_s)
        except WorkerGone as gone:
            worker = None
            raise (RewardTooSlow if gone.late else RewardError)(
                f"reward {self.name} {gone.how} scoring {len(trajectories)} samples, the first is "
                f"{trajectories[0].sample_id!r}; the process was replaced"
            ) from None
        finally:
            self._idle.put(worker)
        if kind == "error":
            raise RewardError(content, sample_ids=sample_ids)
        check_scores(content, trajectories, source=self.name)
        return content

    def _start(self) -> tuple[WorkerProcess, frozenset[str]]:
        """A worker that has imported the function, and the columns that it needs."""
        worker = WorkerProcess(main.__module__)
        self._started = [other for other in self._started if other.alive] + [worker]
        if self._closed:  # while the process was being made
            worker.kill()
        return worker, _introduce(worker, self._config, self.name)


def _introduce(worker: WorkerProcess, config: IsolatedRewardConfig, name: str) -> frozenset[str]:
    """Have the worker import the function; returns the columns that it needs."""
    setup = {
        "prepare": config.prepare,
        "function": config.function,
        "options": dict(config.options),
        "columns": dict(config.columns),
        "name": name,
        # The process is what holds the deadline; the function's own must not come first.
        "timeout_s": 10 * config.timeout_s,
    }
    try:
        kind, content, columns = worker.call(setup, START_TIMEOUT_S)
    except WorkerGone as gone:
        # Not the samples' doing.
        raise WorkerGone(f"{gone.how} while it was imported", late=False) from None
    if kind != "ready":
        worker.kill()
        raise PluginError(f"reward worker: {content}")
    return frozenset(columns)


def open_function(
    config: IsolatedRewardConfig, *, name: str, isolated: bool
) -> tuple[RewardFunction, frozenset[str]]:
    """The function as a reward, and the columns of the data that it needs.

    Args:
        config: the function and how it is called.
        name: of the reward, for messages.
        isolated: True starts a process that imports the function now; False imports it here, and `prepare` and
            `workers` have no meaning.

    Raises:
        PluginError: the function cannot be imported, or has the wrong signature.
    """
    if not isolated:
        here = PythonReward(
            config.function,
            name=name,
            options=config.options,
            columns=config.columns,
            timeout_s=config.timeout_s,
        )
        return here, here.columns
    reward = IsolatedReward(config, name=name)
    try:
        return reward, reward.check()
    except BaseException:
        reward.close()
        raise


def import_path(function: Callable[..., Any]) -> str:
    """The `module:function` path of a function that stands at the top of its module."""
    return f"{function.__module__}:{function.__qualname__}"
