"""Tiny random models of the families that vLLM runs on a CPU, and their log-probs there after weight syncs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rlhf_core import (
    ConfigError,
    EngineDiedError,
    GenerationRequest,
    RolloutConfig,
    SamplingConfig,
    WeightSyncError,
)
from rlhf_core.testing.weight_sync import Trainer, sync
from rlhf_rollout import VLLMBackend

Outcome = Literal["equal", "declined", "refused", "wrong"]

TOLERANCE = 1e-4
"""Nats. Float32 gives 1e-5; what is loaded wrongly is off by 1e-2 or more."""

SYNCS = 2
"""How many syncs of changed weights a family gets; mixtures of experts get `SYNCS_OF_EXPERTS`."""
SYNCS_OF_EXPERTS = 10

_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": 16}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
"""The sizes of DeepSeek's heads: vLLM's kernel on CPUs has these alone."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": _WINDOW,
    "qwen2": {},
    "qwen3": {},
    "gemma2": {**_WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0},
    "gemma3_text": {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": _WINDOW,
    "gpt2": {"n_inner": 192},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "gemma": {},
    "phi": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 192, "word_embed_proj_dim": 128},
    "smollm3": {},
    "cohere2": {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {},
    "starcoder2": _WINDOW,
    "olmo2": {},
    "olmo3": {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": _EXPERTS,
    "gpt_oss": {
        **_WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {
        **_EXPERTS,
        "head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 64,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA_2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": {**_MAMBA_2, "mamba_d_ssm": 256},
    "lfm2": {"conv_dim": 128, "block_dim": 128, "block_ff_dim": 192, "layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16, "expand": 2},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
}
"""Model types, with what makes a tiny model of each special."""

_REQUEST = GenerationRequest(
    request_id="r", prompt_token_ids=tuple(range(40, 70)), sampling=SamplingConfig(max_tokens=24), n=4, seed=0
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of one family."""

    outcome: Outcome
    reason: str = ""
    before: float = 0.0
    """Largest difference of a log-prob between engine and trainer, in nats, as loaded."""
    after: tuple[float, ...] = field(default=())
    """The same after each sync of changed weights."""


def save_family(kind: str, path: Path) -> str:
    """Write a random float32 model of the type, in which no parameter is at a value that hides it (0 or 1)."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    names = set(dir(config_class())) | set(config_class.attribute_map)
    values = {name: value for name, value in _SHAPE.items() if name in names} | FAMILIES[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**values), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    model.save_pretrained(path)
    return str(path)


def judge(kind: str, path: Path, *, syncs: int | None = None) -> Verdict:
    """Start an engine, compare it as loaded, and after syncs of changed weights.

    Args:
        kind: one of `FAMILIES`.
        path: where to write the model.
        syncs: their number, by default `SYNCS` or `SYNCS_OF_EXPERTS`.
    """
    model = save_family(kind, path)
    trainer = Trainer(model)
    trainer.model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        backend = VLLMBackend(_config(model))
    except (ConfigError, EngineDiedError) as error:
        return Verdict(outcome="declined", reason=str(error))
    try:
        return _compared(backend, trainer, syncs or (SYNCS_OF_EXPERTS if _has_experts(trainer) else SYNCS))
    except WeightSyncError as error:
        return Verdict(outcome="refused", reason=str(error))
    finally:
        backend.close()


def _config(model: str) -> RolloutConfig:
    options = {"kv_cache_memory_bytes": 32 << 20}
    return RolloutConfig(model=model, max_model_len=128, max_num_seqs=8, options=options)


def _has_experts(trainer: Trainer) -> bool:
    return any("experts" in name for name, _ in trainer.model.named_parameters())


def _compared(backend: VLLMBackend, trainer: Trainer, syncs: int) -> Verdict:
    before, after = _gap(backend, trainer), []
    for _ in range(syncs):
        trainer.perturb(0.01)
        unsynced = _gap(backend, trainer)
        if unsynced < 10 * TOLERANCE:
            return Verdict(outcome="wrong", reason=f"changed weights change log-probs by {unsynced:.1g} only")
        asyncio.run(sync(backend, trainer))
        after.append(_gap(backend, trainer))
    worst = max(before, *after)
    if not worst <= TOLERANCE:
        place = "as loaded" if not before <= TOLERANCE else f"after sync {1 + after.index(max(after))}"
        reason = f"log-probs off by {worst:.2g} {place}"
        return Verdict(outcome="wrong", reason=reason, before=before, after=tuple(after))
    return Verdict(outcome="equal", before=before, after=tuple(after))


def _gap(backend: VLLMBackend, trainer: Trainer) -> float:
    samples = asyncio.run(backend.generate(_REQUEST)).samples
    gaps = [(trainer.log_probs(_REQUEST, s) - torch.tensor(s.log_probs)).abs().max() for s in samples]
    return float(torch.stack(gaps).max())
