"""Rotary embeddings of heads that come as a dimension of their own, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

Rotation = Callable[..., tuple[Tensor, Tensor | None]]


def rotate_heads_by_torch(model: nn.Module) -> None:
    """Let torch rotate [tokens, heads, size], where vLLM would call its kernel for CPUs.

    The kernel takes the stride between heads for that between tokens, so all log-probs of a model with multi-head
    latent attention (DeepSeek) would be off. It is right for [tokens, heads * size], which other models have.
    """
    for layer in model.modules():
        if isinstance(layer, RotaryEmbedding) and type(layer).forward_cpu is RotaryEmbedding.forward_cpu:
            rotation: Any = layer
            rotation._forward_method = _by_layout(layer.forward_native, layer._forward_method)


def _by_layout(native: Rotation, kernel: Rotation) -> Rotation:
    def rotate(positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return (native if query.dim() > 2 else kernel)(positions, query, key)

    return rotate
