"""Two tensor-parallel workers: both receive full weights, both answer after a failed sync, neither is trusted.

The last test kills one of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rlhf_core import (
    EngineDiedError,
    GenerationRequest,
    RolloutConfig,
    SamplingConfig,
    StaleWeightsError,
    WeightSyncError,
)
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, broken_sync, sync
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack

REQUEST = GenerationRequest(
    request_id="r", prompt_token_ids=tuple(range(10, 40)), sampling=SamplingConfig(max_tokens=24), n=4, seed=1
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, hidden_size=128, tokenizer=False)
    return path


@pytest.fixture(scope="module")
def backend(model_path: Path) -> Iterator[VLLMBackend]:
    config = RolloutConfig(model=str(model_path), max_model_len=128, max_num_seqs=8, tensor_parallel_size=2)
    backend = VLLMBackend(config)
    yield backend
    backend.close()


def gap(backend: VLLMBackend, trainer: Trainer) -> float:
    """Largest difference from the trainer's log-probs, of sampled tokens and of tokens that are scored."""
    samples = asyncio.run(backend.generate(REQUEST)).samples
    expected = trainer.log_probs(REQUEST, samples[0])
    (scored,) = asyncio.run(backend.score_tokens([(*REQUEST.prompt_token_ids, *samples[0].token_ids)]))
    found = [(expected, scored[-len(expected) :]), *((trainer.log_probs(REQUEST, s), s.log_probs) for s in samples)]
    return max(float((right - torch.tensor(given)).abs().max()) for right, given in found)


def test_sharded_workers_sync_fail_and_sync_again(backend: VLLMBackend, model_path: Path) -> None:
    trainer = Trainer(str(model_path))
    assert backend.capabilities.receivers == 2
    assert backend.capabilities.transports == {"gloo", "shm", "disk"}  # not local: the workers are processes
    assert gap(backend, trainer) < 1e-4
    trainer.perturb()
    assert gap(backend, trainer) > 0.1
    asyncio.run(sync(backend, trainer))
    assert gap(backend, trainer) < 1e-4
    for fault in ("missing name", "unknown name", "sender closes"):
        with pytest.raises(WeightSyncError):
            asyncio.run(broken_sync(backend, trainer, fault))
        with pytest.raises(StaleWeightsError):
            asyncio.run(backend.generate(REQUEST))
    trainer.perturb()
    asyncio.run(sync(backend, trainer))
    assert gap(backend, trainer) < 1e-4
    assert backend.weight_version == 2


def test_a_killed_worker_ends_every_call_with_the_cause(backend: VLLMBackend) -> None:
    """Generation in mid-flight, and each later call, name the worker that is gone; closing works."""
    workers = asyncio.run(backend._call(lambda engine: [w.proc for w in engine.model_executor.workers]))
    long = replace(REQUEST, sampling=SamplingConfig(max_tokens=80, min_tokens=80))

    async def die() -> list[object]:
        async def on_and_on(index: int) -> None:
            while True:
                await backend.generate(replace(long, request_id=str(index)))

        running = [asyncio.create_task(on_and_on(index)) for index in range(3)]
        await asyncio.sleep(0.3)
        os.kill(workers[1].pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), timeout=60)

    for error in asyncio.run(die()):
        assert isinstance(error, EngineDiedError)
        assert "worker process VllmWorker-1 was killed by signal 9 (SIGKILL)" in str(error)
    for call in (backend.generate(REQUEST), backend.pause(), backend.resume()):
        with pytest.raises(EngineDiedError, match="VllmWorker-1"):
            asyncio.run(call)
    backend.close()
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive()
