import copy

import pytest
import torch
from rlhf_core import CapabilityError
from rlhf_train.model.buffers import restore_buffers
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
}
LONG = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
KINDS = {
    "qwen2": {},
    "llama": {"rope_parameters": {**LONG, "original_max_position_embeddings": 512}},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neox": {"num_key_value_heads": 2},
}


def as_creation_leaves_it(kind):
    """A 16-bit model, and the same with the buffers that no checkpoint holds rounded."""
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind]}), dtype=torch.bfloat16
    )
    model = copy.deepcopy(plain)
    for name, buffer in plain.named_buffers():
        if name not in plain.state_dict() and buffer.dtype == torch.float32:
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._buffers[own] = buffer.bfloat16()
    return plain, model


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_buffers_are_computed_again_and_nothing_else_changes(kind):
    plain, model = as_creation_leaves_it(kind)
    names = restore_buffers(model, torch.bfloat16)
    assert any("inv_freq" in name for name in names)
    for (name, expected), (_, found) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name
    for (name, expected), (_, found) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(found, expected), name
    assert restore_buffers(model, torch.bfloat16) == []


def test_a_buffer_that_the_model_cannot_compute_again_is_refused():
    _, model = as_creation_leaves_it("qwen2")
    model._init_weights = lambda module: None
    model.model._init_weights = lambda module: None
    with pytest.raises(CapabilityError, match=r"inv_freq.*use stage 2, or dtype float32"):
        restore_buffers(model, torch.bfloat16)
