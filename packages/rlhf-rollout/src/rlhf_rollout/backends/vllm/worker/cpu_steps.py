"""Asynchronous scheduling on a CPU, where vLLM has the scheduler for it and a worker that asks for CUDA's streams.

A CPU computes a step when it is handed out, so that nothing becomes faster: what overlaps there is the order of
things, by which the drain before a weight update is tested with a real engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker import gpu_model_runner


class _Past:
    """An event or a stream of a device that has always finished."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _ComputedOutput(AsyncModelRunnerOutput):
    """What a step has sampled, to be read when the step after it has been handed out."""

    def __init__(
        self,
        *,
        model_runner_output: ModelRunnerOutput,
        sampled_token_ids: Tensor,
        logprobs_tensors: Any,
        invalid_req_indices: list[int],
        **_: Any,
    ) -> None:
        self._output = model_runner_output
        self._log_probs = logprobs_tensors
        self._invalid = invalid_req_indices
        # vLLM's sampler reads these two for penalties.
        self.sampled_token_ids_cpu = sampled_token_ids
        self.async_copy_ready_event = _Past()

    def get_output(self) -> ModelRunnerOutput:
        tokens: list[list[int]] = self.sampled_token_ids_cpu.tolist()
        for index in self._invalid:
            tokens[index].clear()
        self._output.sampled_token_ids = tokens
        self._output.logprobs = self._log_probs.tolists() if self._log_probs is not None else None
        return self._output


@contextlib.contextmanager
def steps_overlap(config: VllmConfig) -> Iterator[None]:
    """Let the engine that is built inside hand out a step before it has read the last one."""
    config.scheduler_config.async_scheduling = True
    gpu_model_runner.AsyncGPUModelRunnerOutput = _ComputedOutput  # type: ignore[misc]
    event, torch.cuda.Event = torch.cuda.Event, _Past  # type: ignore[misc]
    try:
        yield
    finally:
        torch.cuda.Event = event  # type: ignore[misc]
