"""Attention over packed rows, put into a Transformers model without touching its code.

`enable_packing(model)` registers the function with Transformers' AttentionInterface, selects it for the model, and
keeps it only if a small trial gives the same hidden states packed as padded. The trial is run for each kernel that
the device offers (see `segment_kernels`), the fastest first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_core.data.batch import Batch
from rlhf_core.model.attention_kernels import SEGMENT_ATTENTION, Kernel, kernels_for, sdpa_segments
from rlhf_core.model.packing import Layout, pack

NAME = "rlhf_packed"
"""Under which Transformers knows the attention; the kernel's name follows where it is not `sdpa`."""


class HeadExchange(Protocol):
    """Sequence parallelism: ranks hold slices of a packed row, and trade them for shares of the heads."""

    def to_heads(self, states: Tensor) -> Tensor:
        """[1, heads, slice of tokens, head_dim] to [1, share of heads, tokens, head_dim]."""
        ...

    def to_tokens(self, states: Tensor) -> Tensor:
        """[1, tokens, share of heads, head_dim] to [1, slice of tokens, heads, head_dim]."""
        ...


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens head_dim"],
    key: Float[Tensor, "1 key_heads tokens head_dim"],
    value: Float[Tensor, "1 key_heads tokens head_dim"],
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    exchange: HeadExchange | None = None,
    kernel: Kernel = "sdpa",
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 tokens heads head_dim"], None]:
    """Transformers' attention signature. Without a `layout` it is ordinary `sdpa` attention.

    With an `exchange` the arguments hold a slice of the row's tokens, and so does the result. Attention dropout is
    `sdpa`'s alone, whatever the `kernel`.
    """
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if exchange is not None:
        query, key, value = exchange.to_heads(query), exchange.to_heads(key), exchange.to_heads(value)
    dropout = kwargs.get("dropout", 0.0) if module.training else 0.0
    scale = kwargs.get("scaling")
    if dropout:
        output = sdpa_segments(query, key, value, layout, scale=scale, dropout=dropout)
    else:
        output = SEGMENT_ATTENTION[kernel](query, key, value, layout, scale=scale)
    return (output if exchange is None else exchange.to_tokens(output)), None


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
        name = _register(kernel)
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


def _register(kernel: Kernel) -> str:
    """Make the attention known to Transformers; returns its name there."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    name = NAME if kernel == "sdpa" else f"{NAME}_{kernel}"
    AttentionInterface.register(name, partial(packed_attention, kernel=kernel))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def is_packing(model: nn.Module) -> bool:
    """True after `enable_packing` returned True."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return isinstance(name, str) and name.startswith(NAME)


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
    from rlhf_core.model.forward import packed_states, padded_states

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


def has_dropout(model: nn.Module) -> bool:
    """True if the forward pass draws random numbers now: then each row must draw its own."""
    if not model.training:
        return False
    config: Any = copy.copy(getattr(model, "config", None))
    return getattr(config, "attention_dropout", 0.0) > 0 or any(
        module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout)
    )
