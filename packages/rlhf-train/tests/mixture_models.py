"""Tiny random mixture-of-experts and hybrid models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

KINDS = ("mixtral", "qwen-moe", "jamba")
_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def save_mixture(kind: str, path: Path) -> None:
    """Write a model of the kind: Mixtral, Qwen3-MoE, or Jamba (state-space and attention layers, experts)."""
    import transformers as hf

    torch.manual_seed(0)
    model: Any
    if kind == "mixtral":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2))
    elif kind == "qwen-moe":
        config = hf.Qwen3MoeConfig(
            **_SHAPE, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
        )
        model = hf.Qwen3MoeForCausalLM(config)
    else:
        config = hf.JambaConfig(
            **{**_SHAPE, "num_hidden_layers": 4},
            num_experts=4,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=4,
            mamba_dt_rank=4,
        )
        model = hf.JambaForCausalLM(config)
    model.save_pretrained(path)
