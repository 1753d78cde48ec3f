"""What Liger's kernels take over in a model, and what they leave; the kernels themselves run on a GPU alone."""

import sys

import pytest
import torch
from rlhf_core import ConfigError
from rlhf_train.model.fused import use_fused_kernels
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "pad_token_id": 0,
}
IDS = torch.tensor([[1, 2, 3, 4]])


def tiny(family, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | changes)))


@pytest.mark.parametrize(
    ("family", "norms"), [("llama", 5), ("mistral", 5), ("qwen2", 5), ("qwen3", 9), ("gemma2", 9), ("olmo2", 5)]
)
def test_norms_and_gated_mlps_are_taken_over_and_nothing_else(family, norms):
    model = tiny(family)
    family_module = sys.modules[type(model).__module__]
    before = dict(vars(family_module))
    fused = use_fused_kernels(model)
    assert sum("norm" in name for name in fused) == norms
    assert sorted(name for name in fused if "norm" not in name) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    # A model that is made later has none of it.
    assert dict(vars(family_module)) == before
    plain = tiny(family)
    assert torch.isfinite(plain(IDS).logits).all()
    assert not any("forward" in vars(module) for module in plain.modules())


def test_a_gated_mlp_with_another_activation_is_left_alone():
    fused = use_fused_kernels(tiny("llama", hidden_act="gelu"))
    assert fused
    assert not any("mlp" in name.rpartition(".")[2] for name in fused)


def test_what_it_cannot_take_over_is_refused():
    with pytest.raises(ConfigError, match=r"Liger has no kernels for gpt2, only for .*llama"):
        use_fused_kernels(
            AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=8, n_head=2, n_layer=1))
        )
    with pytest.raises(ConfigError, match=r"mixtral routes tokens to experts \(model.layers.0"):
        use_fused_kernels(tiny("mixtral", num_local_experts=2))
