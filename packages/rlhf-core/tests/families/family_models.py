"""Tiny random models of every causal type that Transformers knows, made from its configs alone."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from typing import Any

import torch

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "router_hidden_size", "attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "dff", "dim_ff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "swa_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 128),
    **dict.fromkeys(("max_target_positions", "max_source_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("q_lora_rank", "o_lora_rank"), 16),
    "kv_lora_rank": 8,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "qk_head_dim": 16,
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    "index_n_heads": 4,
    "index_head_dim": 16,
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 4),
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 2.0,
    "is_decoder": True,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT = ("dropout", "pdrop", "layerdrop", "jitter_noise")

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_MLA = {"num_key_value_heads": 4, "head_dim": 8}
"""Attention with compressed keys has as many key heads as heads."""
_LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}

_OF_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3"), _MLA
    ),
    **dict.fromkeys(("longcat_flash", "youtu", "glm_moe_dsa", "hy_v4"), _MLA),
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "qwen2_moe": {"use_sliding_window": False},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LINEAR_AND_FULL),
    "kimi_linear": {**_MLA, **_LINEAR_AND_FULL},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "full_attention"]},
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "gemma3_text", "olmo3", "cohere2"), _SLIDING_AND_FULL),
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"], "attention_head_dim": 16, "mamba_dt_rank": 4},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "attention_head_dim": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
    "roc_bert": {"shape_vocab_size": 8, "pronunciation_vocab_size": 8},
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 8,
        "feed_forward_size": 48,
    },
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "xlstm": {"num_blocks": 2, "chunk_size": 8, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
}


class NotBuiltError(Exception):
    """No tiny model of this type can be made from its config alone."""


def model_types(*, scalar: bool = False) -> list[str]:
    """All model types with a causal language model, or with a head for sequence classification."""
    from transformers.models.auto import modeling_auto

    kind = "SEQUENCE_CLASSIFICATION" if scalar else "CAUSAL_LM"
    return sorted(getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES"))


def tiny_config(kind: str, **changes: Any) -> Any:
    """A config of that type with two layers of 32."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    return config_class(**{**_tiny_values(config_class), **_OF_TYPE.get(kind, {}), **changes})


def _tiny_values(config_class: Any) -> dict[str, Any]:
    known = _names(config_class)
    values = {name: value for name, value in _SIZES.items() if name in known}
    for name in known:
        if any(part in name for part in _NO_DROPOUT):
            values[name] = 0.0
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if hasattr(part, "model_type") and part.model_type:
            values[name] = {
                **_tiny_values(part),
                **_OF_TYPE.get(part.model_type, {}),
                "model_type": part.model_type,
            }
    return values


def _names(config_class: Any) -> set[str]:
    names = set(inspect.signature(config_class.__init__).parameters)
    if is_dataclass(config_class):
        names |= {field.name for field in fields(config_class)}
    return names


def tiny_model(kind: str, *, scalar: bool = False, **changes: Any) -> Any:
    """A random float32 model in which no parameter is at a value that hides it (0 or 1).

    Raises:
        NotBuiltError: the type needs more than its config, or cannot be made small.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    more = {"num_labels": 1, "is_decoder": False} if scalar else {}
    try:
        config = tiny_config(kind, **{**more, **changes})
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
        if size > 10_000_000:
            raise NotBuiltError(f"its tiny config has {size / 1e6:.0f} M parameters")
        torch.manual_seed(0)
        model = auto.from_config(config)
    except NotBuiltError:
        raise
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {str(error).splitlines()[0][:120]}") from error
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()
