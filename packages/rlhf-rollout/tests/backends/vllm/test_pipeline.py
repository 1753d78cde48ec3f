"""Two pipeline stages: each takes its own layers of a sync, weights or adapter, and notices what is missing."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from adapted_trainer import AdaptedTrainer, OnlyAdapter
from rlhf_core import (
    GenerationRequest,
    GenerationResult,
    ModuleWeights,
    RolloutConfig,
    SamplingConfig,
    StaleWeightsError,
    WeightManifest,
    WeightSyncError,
)
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, connect, send_and_receive, sync
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack

REQUEST = GenerationRequest(
    request_id="r", prompt_token_ids=tuple(range(10, 50)), sampling=SamplingConfig(max_tokens=24), n=4, seed=1
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.fixture(scope="module")
def backend(model_path: str) -> Iterator[VLLMBackend]:
    backend = VLLMBackend(
        RolloutConfig(model=model_path, max_model_len=512, max_num_seqs=8, adapter_rank=8, pipeline_parallel_size=2)
    )
    yield backend
    backend.close()


def gap(backend: VLLMBackend, trainer: Trainer, asked: GenerationRequest = REQUEST) -> float:
    """Largest difference from the trainer's log-probs, of sampled tokens and of tokens that are scored."""
    samples = asyncio.run(backend.generate(asked)).samples
    expected = trainer.log_probs(asked, samples[0])
    (scored,) = asyncio.run(backend.score_tokens([(*asked.prompt_token_ids, *samples[0].token_ids)]))
    found = [(expected, scored[-len(expected) :]), *((trainer.log_probs(asked, s), s.log_probs) for s in samples)]
    return max(float((right - torch.tensor(given)).abs().max()) for right, given in found)


async def transfer(backend: VLLMBackend, source: object, manifest: WeightManifest) -> None:
    sender = await connect(backend, "gloo", timeout_s=20)
    try:
        await send_and_receive(backend, source, sender, manifest)  # type: ignore[arg-type]
    finally:
        sender.close()


def test_stages_sync_and_tell_what_is_missing(backend: VLLMBackend, model_path: str) -> None:
    trainer = Trainer(model_path)
    assert backend.capabilities.receivers == 2
    assert gap(backend, trainer) < 1e-4
    adapted = AdaptedTrainer(model_path)
    asyncio.run(transfer(backend, OnlyAdapter(adapted), adapted.adapter_manifest(1)))
    assert gap(backend, adapted) < 1e-4
    trainer.perturb()
    assert gap(backend, trainer) > 0.1
    asyncio.run(sync(backend, trainer))
    assert gap(backend, trainer) < 1e-4
    # The weights of one stage are missing, then those of the other: only that stage can tell.
    for layer in ("model.layers.0.mlp", "model.layers.1.mlp"):
        whole = trainer.manifest(backend.weight_version + 1)
        part = replace(whole, tensors=tuple(spec for spec in whole.tensors if layer not in spec.name))
        with pytest.raises(WeightSyncError, match=rf"got no weights or only a part, among them {layer}"):
            asyncio.run(transfer(backend, ModuleWeights(trainer.model), part))
        with pytest.raises(StaleWeightsError):
            asyncio.run(backend.generate(REQUEST))
    trainer.perturb()
    asyncio.run(sync(backend, trainer))
    assert gap(backend, trainer) < 1e-4


def test_steps_in_flight_between_stages_end_before_weights_change(backend: VLLMBackend, model_path: str) -> None:
    """Two batches are under way at once; every token still has the log-prob of its version's weights."""
    trainer = Trainer(model_path)
    asyncio.run(sync(backend, trainer))
    before = backend.weight_version
    old = copy.deepcopy(trainer)
    trainer.perturb()
    asked = [
        replace(REQUEST, request_id=str(i), seed=10 * i, sampling=SamplingConfig(max_tokens=300)) for i in (1, 2)
    ]

    async def interrupted() -> list[GenerationResult]:
        tasks = [asyncio.create_task(backend.generate(one)) for one in asked]
        await asyncio.sleep(0.2)
        (scores,) = await backend.score_tokens([REQUEST.prompt_token_ids])
        assert (old.row_log_probs(REQUEST.prompt_token_ids) - torch.tensor(scores)).abs().max() < 1e-4
        await asyncio.sleep(0.2)
        await sync(backend, trainer)
        return await asyncio.gather(*tasks)

    results = asyncio.run(interrupted())
    versions = {v for result in results for sample in result.samples for v in sample.weight_versions}
    assert versions == {before, before + 1}
    for one, result in zip(asked, results, strict=True):
        for sample in result.samples:
            new = torch.tensor(sample.weight_versions) == before + 1
            expected = torch.where(new, trainer.log_probs(one, sample), old.log_probs(one, sample))
            assert (torch.tensor(sample.log_probs) - expected).abs().max() < 1e-4


def test_pausing_collects_the_steps_in_flight(backend: VLLMBackend) -> None:
    async def paused() -> tuple[GenerationResult, int]:
        task = asyncio.create_task(backend.generate(replace(REQUEST, sampling=SamplingConfig(max_tokens=300))))
        await asyncio.sleep(0.2)
        await backend.pause("abort")
        under_way = await backend._call(lambda engine: len(engine.engine_core.engine_core.batch_queue))
        await backend.resume()
        return await task, under_way

    result, under_way = asyncio.run(paused())
    assert under_way == 0
    assert {sample.finish_reason for sample in result.samples} == {"abort"}
    assert asyncio.run(backend.generate(REQUEST)).samples
