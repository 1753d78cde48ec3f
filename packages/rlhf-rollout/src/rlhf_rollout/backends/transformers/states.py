"""What a model's layers keep of the tokens before: keys and values, or states of one size (Mamba, convolutions)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad


def new_states(config: Any) -> Any:
    """Empty states of a model, which keep all tokens in layers with a window, too, so that rows can be padded.

    Transformers drops keys behind the window; models mask them all the same.
    """
    from transformers import DynamicCache, cache_utils

    of_config = DynamicCache(config=config)
    if not any(isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin) for layer in of_config.layers):
        return DynamicCache()  # which makes its layers as they come
    # From Transformers 5.14 on.
    both: Any = getattr(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", ())
    layer: Any
    for index, layer in enumerate(of_config.layers):
        if isinstance(layer, both):
            of_config.layers[index] = cache_utils.LinearAttentionAndFullAttentionLayer(layer.number_of_states)
        elif isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
            of_config.layers[index] = cache_utils.DynamicLayer()
    return of_config


def select_rows(states: Any, rows: Int[Tensor, " rows"], padding: int) -> None:
    """Keep some rows, in that order, without the first `padding` tokens."""
    for layer in states.layers:
        if _has_keys(layer):
            layer.keys, layer.values = layer.keys[rows, :, padding:], layer.values[rows, :, padding:]
        for kept in _kept(layer):
            kept.update({number: state[rows] for number, state in kept.items()})


def join_rows(above: Any, below: Any, padding_above: int, padding_below: int) -> None:
    """Put the rows of `above` over those of `below`, each with so many more tokens on the left; changes `below`."""
    for old, new in zip(above.layers, below.layers, strict=True):
        if _has_keys(new):
            for name in ("keys", "values"):
                parts = (getattr(old, name), padding_above), (getattr(new, name), padding_below)
                setattr(new, name, torch.cat([pad(part, (0, 0, padding, 0)) for part, padding in parts]))
        for before, kept in zip(_kept(old), _kept(new), strict=True):
            kept.update({number: torch.cat([before[number], state]) for number, state in kept.items()})


def _has_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def _kept(layer: Any) -> list[dict[int, Tensor]]:
    """States by their number; convolutions without a recurrence (LFM2) have None in the place of one."""
    found = [getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")]
    return [states for states in found if None not in states.values()]
