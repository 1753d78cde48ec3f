"""Attention over packed rows, in the form in which Transformers takes it: a model's code is not touched."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor, nn

from rlhf_core.model.attention_kernels import SEGMENT_ATTENTION, Kernel, sdpa_segments
from rlhf_core.model.packing import Layout

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


def register(kernel: Kernel) -> str:
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


def has_dropout(model: nn.Module) -> bool:
    """True if the forward pass draws random numbers now: then each row must draw its own."""
    if not model.training:
        return False
    config: Any = copy.copy(getattr(model, "config", None))
    return getattr(config, "attention_dropout", 0.0) > 0 or any(
        module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout)
    )
