"""Single changed values into vLLM: afterwards the engine is, bit for bit, what a sync of all weights makes it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rlhf_core import (
    DeltaSource,
    GenerationRequest,
    ModuleWeights,
    RolloutConfig,
    SamplingConfig,
    StaleWeightsError,
    WeightManifest,
    WeightSource,
    WeightSyncError,
)
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import connect, send_and_receive
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack

BUCKET_BYTES = 32 << 10
CHANGED = r"embed_tokens|layers\.0\.self_attn\.k_proj|layers\.1\.mlp\.up_proj|layers\.0\.input_layernorm"


class Served:
    """An engine of a dtype, and the model whose weights it gets."""

    def __init__(self, dtype: str, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self.backend = VLLMBackend(RolloutConfig(model=path, dtype=dtype, max_model_len=64, max_num_seqs=8))

    @torch.no_grad()
    def change(self, seed: int) -> None:
        """A few values of four weights: the first and every 50th."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if re.search(CHANGED, name):
                values = parameter.view(-1)[::50]
                values += torch.randn(values.shape, generator=generator).to(values.dtype)

    def send(self, source: WeightSource, manifest: WeightManifest) -> None:
        async def sync() -> None:
            sender = await connect(self.backend, "shm", timeout_s=30)
            try:
                await send_and_receive(self.backend, source, sender, manifest)
            finally:
                sender.close()

        asyncio.run(sync())

    def send_changes(self, source: DeltaSource) -> WeightManifest:
        manifest = source.changes(self.backend.weight_version + 1, bucket_bytes=BUCKET_BYTES)
        self.send(source, manifest)
        source.confirm(manifest.version)
        return manifest

    def send_all(self) -> None:
        source = ModuleWeights(self.model)
        self.send(source, source.manifest(self.backend.weight_version + 1, bucket_bytes=BUCKET_BYTES))

    def parameters(self) -> dict[str, torch.Tensor]:
        """What the engine computes with."""

        def copies(worker: Any) -> dict[str, torch.Tensor]:
            return {name: p.detach().clone() for name, p in worker.model_runner.model.named_parameters()}

        return self.backend._loop.call(lambda engine: engine.collective_rpc(copies)[0]).result()

    def log_probs(self) -> list[tuple[float, ...]]:
        """Of greedy continuations; packed weights show here."""
        settings = SamplingConfig(max_tokens=12, temperature=0.0)
        prompts = (tuple(range(20 + i, 40 + 3 * i)) for i in range(3))
        found = [
            asyncio.run(
                self.backend.generate(GenerationRequest(request_id="r", prompt_token_ids=prompt, sampling=settings))
            )
            for prompt in prompts
        ]
        return [result.samples[0].log_probs for result in found]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(request.param, save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128))
    yield served
    served.backend.close()


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_changes_make_the_engine_what_all_weights_make_it(served: Served) -> None:
    source = DeltaSource(ModuleWeights(served.model), mode="values")
    assert not served.send_changes(source).partial
    before = served.log_probs()
    for seed in (1, 2):
        served.change(seed)
        manifest = served.send_changes(source)
        assert manifest.partial
        assert all(spec.changed is not None for spec in manifest.tensors if "norm" not in spec.name)
        assert manifest.total_bytes < ModuleWeights(served.model).manifest(0).total_bytes / 5
    changed, log_probs = served.parameters(), served.log_probs()
    assert log_probs != before
    served.send_all()
    assert equal(changed, served.parameters())
    assert log_probs == served.log_probs()


def test_without_a_copy_to_start_from_changes_are_refused(served: Served) -> None:
    """A sync that did not ask for a copy leaves none, nor does one that broke off."""
    source = DeltaSource(ModuleWeights(served.model), mode="values")
    served.send_changes(source)
    served.send_all()
    source.confirm(served.backend.weight_version)
    served.change(3)
    with pytest.raises(WeightSyncError, match="whole tensors"):
        served.send_changes(source)
    with pytest.raises(StaleWeightsError):
        served.log_probs()
    served.send_all()
    assert served.log_probs()
