"""What an engine over several hosts has on each but its first: vLLM's workers there, and nobody who schedules."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import threading
from typing import Any

from rlhf_core import ConfigError, EngineDiedError, RolloutConfig

from rlhf_rollout.backends.vllm.options import engine_arguments, prepare_process
from rlhf_rollout.backends.vllm.workers import ending


class VLLMPart:
    """EnginePart of the vllm backend.

    The workers take their orders from the engine on host 0, over sockets. What ends one of them ends all of this
    part; nobody on host 0 would notice a worker that died between two steps.

    Raises:
        ConfigError: vLLM refuses a setting.
        EngineDiedError: a worker did not start.
    """

    def __init__(self, config: RolloutConfig) -> None:
        if not config.host:
            raise ConfigError("host 0 of an engine has the backend itself, and no part; give another host")
        prepare_process(config)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._closed = threading.Event()
        try:
            settings = EngineArgs(**engine_arguments(config)).create_engine_config()
            self._executor: Any = MultiprocExecutor(settings, monitor_workers=False)
        except (ValueError, OSError) as error:
            raise ConfigError(f"vLLM refuses the rollout configuration: {error}") from error
        except Exception as error:
            raise EngineDiedError(
                f"the vLLM workers of host {config.host} did not start: {type(error).__name__}: {error}"
            ) from error
        self._processes = [worker.proc for worker in self._executor.workers]

    def wait(self) -> str:
        """See EnginePart."""
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes])
        if self._closed.is_set():
            return "it was closed"
        process = next(process for process in self._processes if process.sentinel in ended)
        process.join()
        for other in self._processes:
            other.kill()
        return f"worker process {process.name} {ending(process.exitcode)}"

    def close(self) -> None:
        """See EnginePart."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(Exception):  # of a worker that is gone already
                self._executor.shutdown()
