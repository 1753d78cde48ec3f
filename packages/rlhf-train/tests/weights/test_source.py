import pytest
import torch
from rlhf_core import LoraConfig, WeightSyncError, adapted_layers, add_adapters, send_weights
from rlhf_core.testing.tiny import save_tiny_experts, save_tiny_model
from rlhf_train import ZeroWeights
from safetensors.torch import load_file


def gathered(model, bucket_bytes=1 << 20):
    source = ZeroWeights(model)
    manifest = source.manifest(1, bucket_bytes=bucket_bytes)
    return manifest, {name: t for bucket in manifest.buckets() for name, t in source.gather(bucket)}


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_values_are_those_of_the_checkpoint(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    save_tiny_model(tmp_path, tied=tied)
    stored = load_file(tmp_path / "model.safetensors")
    manifest, found = gathered(AutoModelForCausalLM.from_pretrained(tmp_path), bucket_bytes=3000)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
    assert {spec.name: spec.shape for spec in manifest.tensors} == {n: tuple(t.shape) for n, t in stored.items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 20])
def test_adapters_travel_merged_under_the_names_of_the_checkpoint(tmp_path, tied, bucket_bytes):
    from transformers import AutoModelForCausalLM

    save_tiny_model(tmp_path, tied=tied)
    stored = load_file(tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    add_adapters(model, LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "down_proj")), seed=3, extra="")
    updates = {}
    for name, layer in adapted_layers(model).items():
        with torch.no_grad():
            layer.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(len(name)))
        updates[f"{name}.weight"] = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert len(updates) == 2 * model.config.num_hidden_layers
    _, found = gathered(model, bucket_bytes)
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        expected = tensor + updates[name] if name in updates else tensor
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6 if name in updates else 0)


def test_tied_embeddings_travel_once_and_a_value_head_only_with_its_model(tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    save_tiny_model(tmp_path)
    names = {spec.name for spec in ZeroWeights(AutoModelForCausalLM.from_pretrained(tmp_path)).manifest(1).tensors}
    assert "model.embed_tokens.weight" in names
    assert not names & {"lm_head.weight", "score.weight"}
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert {spec.name for spec in ZeroWeights(critic).manifest(1).tensors} - names == {"score.weight"}


def test_only_rank_0_can_send(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    save_tiny_model(tmp_path)
    source = ZeroWeights(AutoModelForCausalLM.from_pretrained(tmp_path))
    (bucket,) = source.manifest(1, bucket_bytes=1 << 30).buckets()
    for rank, flat in ((1, torch.empty(bucket.nbytes, dtype=torch.uint8)), (0, None)):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        with pytest.raises(WeightSyncError, match=f"leave by training rank 0, but rank {rank}"):
            source.pack(bucket, flat)


def test_fused_experts_travel_as_the_checkpoint_has_them(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(model.named_parameters())
    for bucket_bytes in (64, 600, 1 << 20):
        _, found = gathered(model, bucket_bytes)
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], stored[name]) for name in stored)


class Taking:
    """A sender that keeps what it is given."""

    device = torch.device("cpu")

    def __init__(self, fails_at=None):
        self.bytes, self.fails_at = 0, fails_at

    def buffers(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)

    def send(self, flat, bucket):
        if bucket.index == self.fails_at:
            raise WeightSyncError("a receiver is gone")
        self.bytes += flat.numel()
        return self

    def wait(self):
        pass

    finish = close = wait


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("bucket_bytes", [5_000, 70_000, 1 << 30])
def test_every_parameter_is_gathered_once_in_a_sync(tmp_path, family, bucket_bytes):
    """Buckets smaller than an expert, smaller than a layer's experts, and one for all."""
    from transformers import AutoModelForCausalLM

    source = ZeroWeights(AutoModelForCausalLM.from_pretrained(save_tiny_experts(tmp_path, family)))
    manifest = source.manifest(1, bucket_bytes=bucket_bytes)
    for _ in range(2):
        report = send_weights(source, manifest, Taking())
        assert report.gathered_per_sent == 1.0
        assert report.bytes == manifest.total_bytes > 1e6
    assert send_weights(source, manifest, None).gathered_per_sent == 1.0


def test_what_a_broken_or_partial_sync_kept_is_not_sent_later(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny_experts(tmp_path))
    source = ZeroWeights(model)
    manifest = source.manifest(1, bucket_bytes=70_000)
    with pytest.raises(WeightSyncError, match="is gone"):
        send_weights(source, manifest, Taking(fails_at=4))
    buckets = manifest.buckets()
    some = next(bucket for bucket in buckets if "experts.0" in bucket.tensors[0].name)
    list(source.gather(some))  # an end that never came
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    found = {name: t for bucket in buckets for name, t in source.gather(bucket)}
    exact = dict(ZeroWeights(model).gather(source.manifest(1, bucket_bytes=1 << 30).buckets()[0]))
    assert found.keys() == exact.keys()
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    assert source._kept == {}
