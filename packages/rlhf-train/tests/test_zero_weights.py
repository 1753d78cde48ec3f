import pytest
import torch
from rlhf_core.testing.tiny import save_tiny_model
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
    for bucket_bytes in (600, 1 << 20):
        _, found = gathered(model, bucket_bytes)
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], stored[name]) for name in stored)
