"""What keys and values of a model take in memory."""

from __future__ import annotations

from typing import Any

import torch


def cache_bytes_per_token(text: Any, dtype: str, *, layers: int | None = None) -> int:
    """Bytes of the keys and values of one token in all layers.

    Args:
        text: the configuration (Transformers) of the model, of its text part.
        dtype: name of the type that the cache has.
        layers: how many the model has, where its configuration stands for a deeper one.

    Raises:
        AttributeError: the architecture has no attention heads of one size.
    """
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * (layers or text.num_hidden_layers) * heads * size * getattr(torch, dtype).itemsize
