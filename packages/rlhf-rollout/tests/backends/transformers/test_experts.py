"""Mixtures of experts, whose layers Transformers fuses: generated and synced as their checkpoint has them."""

import asyncio

import pytest
import torch
import transformers
from packaging.version import Version
from rlhf_core import DeltaSource, GenerationRequest, ModuleWeights, RolloutConfig, SamplingConfig
from rlhf_core.testing.tiny import save_tiny_experts
from rlhf_core.testing.weight_sync import Trainer, connect, send_and_receive, sync
from rlhf_rollout import TransformersBackend

REQUEST = GenerationRequest(
    request_id="r", prompt_token_ids=tuple(range(40, 60)), sampling=SamplingConfig(max_tokens=16), n=2, seed=0
)


OLD = Version(transformers.__version__) < Version("5.19")


@pytest.fixture(
    params=[
        "mixtral",
        "qwen3_moe",
        pytest.param("jamba", marks=pytest.mark.skipif(OLD, reason="refused: states are kept in another form")),
    ]
)
def served(request, tmp_path):
    path = save_tiny_experts(tmp_path, request.param)
    backend = TransformersBackend(RolloutConfig(model=path, max_model_len=128))
    yield backend, Trainer(path)
    backend.close()


def gap(backend, trainer):
    samples = asyncio.run(backend.generate(REQUEST)).samples
    return max(
        float((trainer.log_probs(REQUEST, sample) - torch.tensor(sample.log_probs)).abs().max())
        for sample in samples
    )


def test_log_probs_agree_before_and_after_every_sync(served):
    backend, trainer = served
    assert gap(backend, trainer) < 1e-4
    for _ in range(3):
        trainer.perturb(0.01)
        assert gap(backend, trainer) > 1e-3
        asyncio.run(sync(backend, trainer))
        assert gap(backend, trainer) < 1e-4


def test_rows_of_several_lengths_join_and_leave(served):
    """Jamba keeps a state beside keys and values, which rows take along."""
    backend, trainer = served
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=tuple(range(40, 40 + length)),
            sampling=SamplingConfig(max_tokens=4 + 3 * number),
            n=2,
            seed=number,
        )
        for number, length in enumerate((12, 5, 20))
    ]

    async def staggered():
        running = []
        for request in requests:
            running.append(asyncio.create_task(backend.generate(request)))
            await asyncio.sleep(0.01)
        return await asyncio.gather(*running)

    for request, result in zip(requests, asyncio.run(staggered()), strict=True):
        for sample in result.samples:
            assert torch.allclose(trainer.log_probs(request, sample), torch.tensor(sample.log_probs), atol=1e-4)


@pytest.mark.parametrize(("mode", "share"), [("tensors", 0.5), ("values", 0.01)])
def test_a_change_of_one_expert_travels_alone(served, mode, share):
    backend, trainer = served
    source = DeltaSource(ModuleWeights(trainer.model), mode=mode)
    experts = next(
        part for name, part in trainer.model.named_modules() if ".1." in name and name.endswith(".experts")
    )

    async def both():
        sender = await connect(backend, "local", timeout_s=30)
        sizes = []
        for version in (1, 2):
            manifest = source.changes(version)
            sizes.append(manifest.total_bytes)
            await send_and_receive(backend, source, sender, manifest)
            source.confirm(version)
            with torch.no_grad():
                experts.gate_up_proj[2, :3] += 0.5
        sender.close()
        with torch.no_grad():  # the last change was not sent
            experts.gate_up_proj[2, :3] -= 0.5
        return sizes

    whole, partial = asyncio.run(both())
    assert partial < share * whole
    assert gap(backend, trainer) < 1e-4
