"""Adapters alone travel from DeepSpeed (ZeRO-3) to vLLM, and mean there what merged weights would."""

import asyncio

import pytest
import torch
from rlhf_core import (
    Batch,
    ConfigError,
    EngineConfig,
    GenerationRequest,
    LoraConfig,
    Loss,
    LossTerms,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
    receive_weights,
)
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.handles import LocalHandle
from rlhf_launch.workers.rollout_engine import RolloutWorker
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.train_rank import TrainWorker
from rlhf_launch.workers.waits import Waits

PATIENCE_S = 120.0
REQUEST = GenerationRequest(
    request_id="r", prompt_token_ids=tuple(range(20, 60)), sampling=SamplingConfig(max_tokens=16), n=2, seed=0
)


def likelihood(outputs, batch, config):
    """Raise the likelihood of the response."""
    mask = batch.response_mask
    return LossTerms(total=-(outputs.log_probs * mask).sum(), weight=mask.sum().float(), metrics={})


def batch_of(sample):
    tokens = torch.tensor([[*REQUEST.prompt_token_ids, *sample.token_ids]])
    mask = torch.arange(tokens.shape[1])[None] >= len(REQUEST.prompt_token_ids)
    return Batch(token_ids=tokens, attention_mask=torch.ones_like(tokens).bool(), response_mask=mask)


class Stack:
    """One engine of each kind in this process."""

    def __init__(self, trainer, rollout):
        self.policy = TrainGroup("policy", [LocalHandle("policy-0", lambda: trainer)], waits=Waits(PATIENCE_S))
        self.policy.start()
        self.rollout = rollout
        self.pool = RolloutPool([LocalHandle("rollout-0", lambda: rollout)], waits=Waits(PATIENCE_S))
        self.pool.start()

    def sync(self, **options):
        return WeightSync(
            self.policy,
            self.pool,
            transports=("local",),
            options=WeightSyncSection(**options),
        )

    def close(self):
        self.pool.close()
        self.policy.close()


@pytest.mark.stack
def test_adapters_travel_alone_from_zero3_to_vllm(tmp_path, monkeypatch):
    path = save_tiny_model(tmp_path, tokenizer=False)
    config = EngineConfig(
        model=path,
        role="policy",
        optimizer=OptimizerConfig(learning_rate=0.05),
        lora=LoraConfig(rank=4, alpha=16.0),
        options={"stage": 3},
    )
    rollout = RolloutWorker("vllm", RolloutConfig(model=path, max_model_len=128, adapter_rank=4), {})
    stack = Stack(TrainWorker("deepspeed", config, {}), rollout)

    def gap():
        samples = asyncio.run(stack.pool.generate(REQUEST)).samples
        found = []
        for sample in samples:
            scored = stack.policy.score(batch_of(sample), ("log_probs",)).log_probs[0]
            expected = scored[len(REQUEST.prompt_token_ids) :][: sample.length]
            found.append(float((expected - torch.tensor(sample.log_probs)).abs().max()))
        return max(found)

    sync, merged = stack.sync(adapters="adapter"), stack.sync()
    loss = Loss(function=likelihood, config=None)
    (first, *_) = asyncio.run(stack.pool.generate(REQUEST)).samples
    for version in (1, 2):
        stack.policy.step(batch_of(first), loss)
        assert gap() > 0.01
        report = sync(version)
        assert gap() < 1e-4
        assert report.probes[0].gap.largest < 1e-4, "the probe is scored with the adapter"
        assert stack.pool.weight_versions() == [version]
    stack.policy.step(batch_of(first), loss)
    whole = merged(3)
    assert gap() < 1e-4
    assert report.bytes < whole.bytes / 5
    check_what_is_done_about_an_adapter_that_is_not_taken(stack, first, monkeypatch)
    stack.close()


def check_what_is_done_about_an_adapter_that_is_not_taken(stack, sample, monkeypatch):
    """Sent alone, it is left out without a word: caught, and merged weights travel from then on."""
    from rlhf_rollout.backends.vllm.worker import adapters

    def take_and_forget(lora_manager, manifest, receiver):
        receive_weights(manifest, receiver, list)

    rollout = RolloutWorker("vllm", stack.rollout._config, {})
    pool = RolloutPool([LocalHandle("rollout-1", lambda: rollout)], waits=Waits(PATIENCE_S))
    pool.start()
    monkeypatch.setattr(adapters, "install", take_and_forget)
    sync = WeightSync(
        stack.policy,
        pool,
        transports=("local",),
        options=WeightSyncSection(adapters="adapter"),
    )
    sent = [sync(1), sync(2)]
    assert [report.probes[0].gap.largest < 1e-4 for report in sent] == [True, True]
    assert not any(report.partial for report in sent), "all weights travelled"
    pool.close()


def test_both_ends_must_know_adapters(tmp_path):
    path = save_tiny_model(tmp_path, tokenizer=False)
    trainer = TrainWorker("torch", EngineConfig(model=path, role="policy"), {})
    rollout = RolloutWorker("transformers", RolloutConfig(model=path), {})
    stack = Stack(trainer, rollout)
    with pytest.raises(ConfigError, match="this one does not"):
        stack.sync(adapters="adapter")
    with pytest.raises(ConfigError, match=r"keep_kv_cache=true .* this one does not"):
        stack.sync(keep_kv_cache=True)
    with pytest.raises(ConfigError, match="torch cannot send adapters alone"):
        stack.policy.manifest(1, bucket_bytes=1000, adapters=True)
    with pytest.raises(ConfigError, match="merged or adapter"):
        WeightSyncSection(adapters="both")
    with pytest.raises(ConfigError, match="leave out one"):
        WeightSyncSection(adapters="adapter", delta="values")
    stack.close()
