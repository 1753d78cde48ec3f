"""Mixtures of experts in vLLM: right log-probs as loaded, after the first sync, and after the tenth."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

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
from rlhf_core.testing.tiny import save_tiny_experts
from rlhf_core.testing.weight_sync import BUCKET_BYTES, Trainer, connect, send_and_receive
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack

REQUEST = GenerationRequest(
    request_id="r", prompt_token_ids=tuple(range(40, 70)), sampling=SamplingConfig(max_tokens=24), n=4, seed=0
)


class Served:
    """An engine and the model whose weights it gets."""

    def __init__(self, path: str) -> None:
        self.backend = VLLMBackend(RolloutConfig(model=path, max_model_len=128, max_num_seqs=8))
        self.trainer = Trainer(path)

    def gap(self) -> float:
        """Largest difference of a log-prob from Transformers' forward pass."""
        samples = asyncio.run(self.backend.generate(REQUEST)).samples
        return max(
            float((self.trainer.log_probs(REQUEST, s) - torch.tensor(s.log_probs)).abs().max()) for s in samples
        )

    def send(self, source: WeightSource, manifest: WeightManifest) -> None:
        async def sync() -> None:
            sender = await connect(self.backend, "shm", timeout_s=30)
            try:
                await send_and_receive(self.backend, source, sender, manifest)
            finally:
                sender.close()

        asyncio.run(sync())

    def manifest(self) -> WeightManifest:
        return self.trainer.manifest(self.backend.weight_version + 1)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(save_tiny_experts(tmp_path_factory.mktemp("model"), request.param))
    yield served
    served.backend.close()


def test_log_probs_are_right_before_and_after_ten_syncs(served: Served) -> None:
    assert served.gap() < 1e-4
    for number in range(10):
        if number:  # the first brings what is there already
            served.trainer.perturb(0.01)
            assert served.gap() > 1e-3
        served.send(ModuleWeights(served.trainer.model), served.manifest())
        assert served.gap() < 1e-4, f"after sync {number + 1}"


def test_changed_values_of_one_expert(served: Served) -> None:
    source = DeltaSource(ModuleWeights(served.trainer.model), mode="values")
    for _ in range(3):
        manifest = source.changes(served.backend.weight_version + 1, bucket_bytes=BUCKET_BYTES)
        served.send(source, manifest)
        source.confirm(manifest.version)
        assert served.gap() < 1e-4
        with torch.no_grad():
            served.trainer.model.model.layers[1].mlp.experts.down_proj[2, :3] += 0.5  # type: ignore[union-attr]
    assert manifest.partial
    assert served.gap() > 1e-3


def test_an_expert_that_does_not_come_is_missed_and_the_next_sync_mends_all(served: Served) -> None:
    manifest = served.manifest()
    lost = next(spec for spec in manifest.tensors if ".experts.3." in spec.name)
    rest = replace(manifest, tensors=tuple(spec for spec in manifest.tensors if spec != lost))
    with pytest.raises(WeightSyncError, match="got no weights or only a part"):
        served.send(ModuleWeights(served.trainer.model), rest)
    with pytest.raises(StaleWeightsError):
        served.gap()
    served.send(ModuleWeights(served.trainer.model), served.manifest())
    assert served.gap() < 1e-4
