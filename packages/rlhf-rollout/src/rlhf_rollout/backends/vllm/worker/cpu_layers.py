"""Layers whose way on a CPU is not the one that vLLM takes there: one of its kernels is wrong, another unused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_VECTOR = 16
"""Numbers that a kernel takes at a time."""
Activation = Callable[[Tensor], Tensor]
Norm = Callable[..., Tensor | tuple[Tensor, Tensor]]
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


def normalize_by_kernel(model: nn.Module) -> None:
    """Let vLLM's own kernels for CPUs normalize by the root of mean squares, where vLLM would do it by some eight
    operations of torch each time, which take a seventh of the generation of a small model.

    Inputs that the kernels do not take (another dtype than the weight, a stride) go the old way.
    """
    for layer in model.modules():
        if type(layer) is RMSNorm and layer.variance_size_override is None:
            norm: Any = layer
            norm._forward_method = _by_kernel(layer)


def _by_kernel(layer: RMSNorm) -> Norm:
    native, epsilon = layer.forward_native, layer.variance_epsilon

    def normalize(x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        weight = layer.weight
        if weight.dtype != x.dtype or not x.is_contiguous():
            return native(x, residual)
        if residual is None:
            found = torch.empty_like(x)
            torch.ops._C.rms_norm(found, x, weight, epsilon)
            return found
        if residual.dtype != x.dtype or not residual.is_contiguous():
            return native(x, residual)
        torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual

    return normalize


def activate_by_kernel(model: nn.Module) -> None:
    """Let vLLM's own kernel for CPUs compute silu(gate) * up, where vLLM would do it by two operations of torch on
    parts of a tensor that do not lie together: about a fifteenth of the generation of a small model.
    """
    for layer in model.modules():
        if type(layer) is SiluAndMul and type(layer).forward_cpu is SiluAndMul.forward_cpu:
            activation: Any = layer
            activation._forward_method = _activate_by_kernel(layer.forward_native)


def _activate_by_kernel(native: Activation) -> Activation:
    def activate(x: Tensor) -> Tensor:
        size = x.shape[-1] // 2
        if size % _VECTOR or not x.is_contiguous() or x.dtype not in (torch.float32, torch.bfloat16):
            return native(x)
        found = x.new_empty(*x.shape[:-1], size)
        torch.ops._C.silu_and_mul(found, x)
        return found

    return activate
