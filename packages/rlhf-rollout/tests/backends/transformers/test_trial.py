"""What a model's cached decoding must give before it is sampled from."""

import logging

import pytest
import torch
from rlhf_core import ConfigError, RolloutConfig
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_rollout import TransformersBackend
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
)

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


def save(model, path):
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def attention_of(path):
    backend = TransformersBackend(RolloutConfig(model=path, max_model_len=64))
    backend.close()
    return backend._model.config._attn_implementation


def test_a_plain_model_keeps_its_attention(tmp_path, caplog):
    assert attention_of(save_tiny_model(tmp_path)) == "sdpa"
    assert not caplog.records


def test_a_soft_cap_that_sdpa_leaves_out_is_kept_by_eager_attention(tmp_path, caplog):
    config = Gemma2Config(**SHAPE, attn_logit_softcapping=1.0, query_pre_attn_scalar=1)
    with caplog.at_level(logging.WARNING):
        assert attention_of(save(Gemma2ForCausalLM(config), tmp_path)) == "eager"
    assert "(gemma2) is sampled from with eager attention: with sdpa its log-probs are off by" in caplog.text


def test_a_model_whose_states_are_not_passed_on_is_refused_by_name(tmp_path):
    config = Mamba2Config(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1
    )
    how = r"(differ from .* by up to .* nats|its cached decoding of padded rows fails)"  # older Transformers fail
    with pytest.raises(ConfigError, match=rf"\(mamba2\) cannot be sampled from .* {how}"):
        attention_of(save(Mamba2ForCausalLM(config), tmp_path))


def test_a_model_with_a_cache_of_its_own_is_refused_by_name(tmp_path):
    config = MiniMaxConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, block_size=8)
    with pytest.raises(ConfigError, match=r"\(minimax\) cannot be sampled from .* cached decoding .* fails"):
        attention_of(save(MiniMaxForCausalLM(config), tmp_path))
