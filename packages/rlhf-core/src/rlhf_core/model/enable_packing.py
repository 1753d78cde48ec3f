"""Letting a Transformers model run packed rows, after a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlhf_core.data.batch import Batch
from rlhf_core.model.attention_kernels import Kernel, kernels_for
from rlhf_core.model.hidden_states import packed_states, padded_states
from rlhf_core.model.packed_attention import is_packing, register
from rlhf_core.model.packing import pack


def enable_packing(model: nn.Module) -> bool:
    """Let `model_outputs` run this Transformers model on packed rows; False if the model cannot.

    Models cannot whose attention has windows, soft caps or sinks, that carry a state along the sequence, or
    whose attention was chosen to be something else than `sdpa`. All ranks of a sharded model call it together,
    as it runs the model twice on a few tokens.
    """
    config = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if is_packing(model):
        return True
    if config is None or before != "sdpa" or not _is_plain(model, config):
        return False
    selected: Any = model
    for kernel in _kernels(model):
        name = register(kernel)
        selected.set_attn_implementation(name)
        if config._attn_implementation == name and _trial(model):
            return True
    selected.set_attn_implementation(before)
    return False


def _kernels(model: Any) -> Sequence[Kernel]:
    """Those to try, the fastest first."""
    weight = model.get_input_embeddings().weight
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    heads = getattr(text, "num_attention_heads", None) or 1
    head_dim = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // heads
    return kernels_for(weight.device, weight.dtype, head_dim)


def _is_plain(model: Any, config: Any) -> bool:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return (
        getattr(model, "_supports_attention_backend", False)
        and not getattr(model, "_is_stateful", False)
        and not getattr(text, "is_encoder_decoder", False)
        and kinds == {"full_attention"}
        and getattr(text, "attn_logit_softcapping", None) is None
    )


def _trial(model: Any) -> bool:
    """Whether two short rows with a common prompt have the same hidden states packed as padded."""
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[3, 1, 4, 1, 5, 0], [3, 1, 4, 2, 6, 5]], device=device)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]], device=device).bool()
    answers = mask & (torch.arange(6, device=device) >= 3)
    batch = Batch(token_ids=ids, attention_mask=mask, response_mask=answers)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            padded, packed = padded_states(model, batch), packed_states(model, pack(batch))
            left, right = padded.at(mask), packed.at(mask)
    except (TypeError, ValueError, RuntimeError, ImportError):
        return False
    finally:
        model.train(training)
    tolerance = 1e-4 if left.dtype in (torch.float32, torch.float64) else 0.05
    return bool((left - right).abs().max() <= tolerance * left.abs().max())
