"""Adapters in vLLM: a sync of the adapter alone is worth one of all merged weights."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_trainer import AdaptedTrainer, Merged, OnlyAdapter
from interruptions import paused_amid
from rlhf_core import (
    CapabilityError,
    ConfigError,
    GenerationRequest,
    GenerationResult,
    RolloutConfig,
    SamplingConfig,
    StaleWeightsError,
    WeightManifest,
    WeightSyncError,
)
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, connect, cpu_transport, send_and_receive
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack

# Longer than two cache blocks: states that an old adapter left must not survive a sync.
PROMPT = tuple(5 + i % 200 for i in range(90))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param, tokenizer=False)


@pytest.fixture
def backend(model_path: str) -> Iterator[VLLMBackend]:
    backend = VLLMBackend(config(model_path, adapter_rank=8))
    yield backend
    backend.close()


@pytest.fixture
def trainer(model_path: str) -> AdaptedTrainer:
    return AdaptedTrainer(model_path)


def config(model: str, **settings: Any) -> RolloutConfig:
    return RolloutConfig(model=model, max_model_len=600, max_num_seqs=8, **settings)


def request(max_tokens: int = 12, *, n: int = 2) -> GenerationRequest:
    sampling = SamplingConfig(max_tokens=max_tokens)
    return GenerationRequest(request_id="r", prompt_token_ids=PROMPT, sampling=sampling, n=n, seed=0)


def gap(backend: VLLMBackend, trainer: Trainer) -> float:
    asked = request()
    samples = asyncio.run(backend.generate(asked)).samples
    return max(float((trainer.log_probs(asked, s) - torch.tensor(s.log_probs)).abs().max()) for s in samples)


async def transfer(backend: VLLMBackend, source: Any, manifest: WeightManifest) -> None:
    sender = await connect(backend, cpu_transport(backend), timeout_s=10)
    try:
        await send_and_receive(backend, source, sender, manifest)
    finally:
        sender.close()


async def sync_adapter(backend: VLLMBackend, trainer: AdaptedTrainer) -> WeightManifest:
    manifest = trainer.adapter_manifest(backend.weight_version + 1)
    await transfer(backend, OnlyAdapter(trainer), manifest)
    return manifest


def test_an_adapter_alone_is_worth_a_sync_of_all_merged_weights(
    backend: VLLMBackend, trainer: AdaptedTrainer, model_path: str
) -> None:
    assert backend.capabilities.adapters
    assert gap(backend, Trainer(model_path)) < 1e-4  # before the first sync: the model as it was loaded
    assert gap(backend, trainer) > 0.1
    manifest = asyncio.run(sync_adapter(backend, trainer))
    assert gap(backend, trainer) < 1e-4
    everything = trainer.manifest(1).total_bytes
    assert manifest.total_bytes < everything / 5
    trainer.perturb()
    assert gap(backend, trainer) > 0.1
    asyncio.run(sync_adapter(backend, trainer))  # takes the place of the first
    assert gap(backend, trainer) < 1e-4
    trainer.perturb()
    merged = trainer.manifest(backend.weight_version + 1)
    asyncio.run(transfer(backend, Merged(trainer.model), merged))  # takes the place of both
    assert gap(backend, trainer) < 1e-4
    assert set(asyncio.run(backend.generate(request())).samples[0].weight_versions) == {3}
    check_bases(backend, trainer)


def check_bases(backend: VLLMBackend, trainer: AdaptedTrainer) -> None:
    """The engine holds merged weights of version 3: an adapter for those of version 0 would count twice."""
    with pytest.raises(WeightSyncError, match=r"belongs to weights of version 0, and this engine holds version 3"):
        asyncio.run(backend.receive_weights(trainer.adapter_manifest(4)))
    with pytest.raises(StaleWeightsError):
        asyncio.run(backend.generate(request()))
    asyncio.run(transfer(backend, OnlyAdapter(trainer), trainer.adapter_manifest(4, base_version=3)))
    assert asyncio.run(backend.generate(request())).samples[0].weight_versions[0] == 4
    # Changes to version 4 are changes to merged weights, which are not what lies below the adapter.
    changes = replace(trainer.manifest(5), base_version=4)
    with pytest.raises(WeightSyncError, match="send all weights"):
        asyncio.run(backend.receive_weights(changes))


def test_kept_requests_go_on_with_the_new_adapter(backend: VLLMBackend, trainer: AdaptedTrainer) -> None:
    """Every log-prob is that of a forward pass with the adapter of its token's version."""
    asyncio.run(sync_adapter(backend, trainer))
    old, asked = copy.deepcopy(trainer), request(400, n=4)
    trainer.perturb()

    async def interrupted() -> GenerationResult:
        task = await paused_amid(backend, asked)
        await sync_adapter(backend, trainer)
        await backend.resume()
        return await task

    result = asyncio.run(interrupted())
    assert {version for sample in result.samples for version in sample.weight_versions} == {1, 2}
    for sample in result.samples:
        new = torch.tensor(sample.weight_versions) == 2
        expected = torch.where(new, trainer.log_probs(asked, sample), old.log_probs(asked, sample))
        assert (torch.tensor(sample.log_probs) - expected).abs().max() < 1e-4
    check_refusals(backend, trainer)


def check_refusals(backend: VLLMBackend, trainer: AdaptedTrainer) -> None:
    """What does not fit is refused with a reason, and the next good sync makes up for it."""
    good = trainer.adapter_manifest(3)
    name = next(iter(trainer.adapter))
    half = replace(good, tensors=tuple(spec for spec in good.tensors if spec.name != name))
    high = replace(good, adapter=replace(trainer.scale, rank=16))
    source = OnlyAdapter(trainer)
    for manifest, message in ((half, "only one of lora_A and lora_B"), (high, "greater than max_lora_rank 8")):
        with pytest.raises(WeightSyncError, match=message):
            asyncio.run(transfer(backend, source, manifest))
        with pytest.raises(StaleWeightsError):
            asyncio.run(backend.generate(request()))
    source._tensors = {name.replace("o_proj", "w_proj"): t for name, t in source._tensors.items()}
    strange = replace(
        good, tensors=tuple(replace(s, name=s.name.replace("o_proj", "w_proj")) for s in good.tensors)
    )
    with pytest.raises(WeightSyncError, match=r"2 layers of the adapter have none in vLLM.*w_proj"):
        asyncio.run(transfer(backend, source, strange))
    asyncio.run(transfer(backend, OnlyAdapter(trainer), good))
    assert gap(backend, trainer) < 1e-4


def test_an_engine_without_adapters_says_what_to_write(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, tokenizer=False)
    backend = VLLMBackend(config(path))
    assert not backend.capabilities.adapters
    with pytest.raises(CapabilityError, match="adapter_rank of at least 4"):
        asyncio.run(backend.receive_weights(AdaptedTrainer(path).adapter_manifest(1)))
    assert asyncio.run(backend.generate(request())).samples  # nothing was harmed
    backend.close()
    with pytest.raises(ConfigError, match="sleep_level"):
        VLLMBackend(config(path, adapter_rank=8, options={"sleep_level": 2}))
    with pytest.raises(ConfigError, match="it follows from"):
        VLLMBackend(config(path, options={"enable_lora": True}))
    with pytest.raises(ConfigError, match="room for 512"):
        VLLMBackend(config(path, adapter_rank=513))
