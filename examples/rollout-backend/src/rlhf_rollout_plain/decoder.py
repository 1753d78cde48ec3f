"""A Llama-type decoder as one function of its weights, a dict under checkpoint names.

RMSNorm before each block, rotary positions, grouped-query attention, SwiGLU. Qwen2 adds biases to the query, key
and value projections, which are used wherever the checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """The numbers of a model's config that its weights do not tell."""

    layers: int
    heads: int
    key_value_heads: int
    rope_theta: float
    norm_eps: float
    end_of_text: frozenset[int] = frozenset()


@dataclass(slots=True)
class Cache:
    """Keys and values per layer, each [rows, key_value_heads, length, head_dim]. All rows have one length."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def select(self, rows: Tensor) -> Cache:
        """The given rows, in the given order; a row may be repeated."""
        return Cache([(keys[rows], values[rows]) for keys, values in self.layers])


def next_token_logits(
    weights: Weights, shape: DecoderShape, token_ids: Int[Tensor, "rows new"], cache: Cache
) -> Float[Tensor, "rows vocab"]:
    """Logits after the last of the new tokens, which are added to `cache`."""
    return _head(weights, shape, _run(weights, shape, token_ids, cache)[:, -1])


def token_log_probs(weights: Weights, shape: DecoderShape, row: Int[Tensor, " length"]) -> Float[Tensor, " rest"]:
    """Log-probs of a row's tokens, from the second on, given those before them."""
    hidden = _run(weights, shape, row.unsqueeze(0), Cache())[0, :-1]
    log_probs = _head(weights, shape, hidden).float().log_softmax(dim=-1)
    return log_probs.gather(-1, row[1:].unsqueeze(-1)).squeeze(-1)


def _run(
    weights: Weights, shape: DecoderShape, token_ids: Int[Tensor, "rows new"], cache: Cache
) -> Float[Tensor, "rows new hidden"]:
    """States of the new tokens after all layers."""
    embedding = weights["model.embed_tokens.weight"]
    hidden = embedding[token_ids]
    positions = torch.arange(cache.length, cache.length + token_ids.shape[1], device=token_ids.device)
    for layer in range(shape.layers):
        block = f"model.layers.{layer}"
        normed = _rms_norm(hidden, weights[f"{block}.input_layernorm.weight"], shape.norm_eps)
        hidden = hidden + _attention(weights, f"{block}.self_attn", shape, normed, positions, cache, layer)
        normed = _rms_norm(hidden, weights[f"{block}.post_attention_layernorm.weight"], shape.norm_eps)
        hidden = hidden + _swiglu(weights, f"{block}.mlp", normed)
    return hidden


def _head(weights: Weights, shape: DecoderShape, hidden: Float[Tensor, "*at hidden"]) -> Float[Tensor, "*at vocab"]:
    normed = _rms_norm(hidden, weights["model.norm.weight"], shape.norm_eps)
    # Tied checkpoints have no head of their own.
    return linear(normed, weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))


def _attention(
    weights: Weights,
    name: str,
    shape: DecoderShape,
    hidden: Float[Tensor, "rows new hidden"],
    positions: Int[Tensor, " new"],
    cache: Cache,
    layer: int,
) -> Float[Tensor, "rows new hidden"]:
    def heads(projection: str, count: int) -> Float[Tensor, "rows heads new head_dim"]:
        return _project(weights, f"{name}.{projection}", hidden).unflatten(-1, (count, -1)).transpose(1, 2)

    queries = _rotate(heads("q_proj", shape.heads), positions, shape.rope_theta)
    keys = _rotate(heads("k_proj", shape.key_value_heads), positions, shape.rope_theta)
    values = heads("v_proj", shape.key_value_heads)
    if layer < len(cache.layers):
        old_keys, old_values = cache.layers[layer]
        keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        cache.layers[layer] = keys, values
    else:
        cache.layers.append((keys, values))
    sharing = shape.heads // shape.key_value_heads
    visible = torch.arange(keys.shape[2], device=positions.device) <= positions.unsqueeze(-1)
    mixed = scaled_dot_product_attention(
        queries, keys.repeat_interleave(sharing, dim=1), values.repeat_interleave(sharing, dim=1), attn_mask=visible
    )
    return _project(weights, f"{name}.o_proj", mixed.transpose(1, 2).flatten(2))


def _project(weights: Weights, name: str, hidden: Tensor) -> Tensor:
    return linear(hidden, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _swiglu(weights: Weights, name: str, hidden: Tensor) -> Tensor:
    gate = silu(_project(weights, f"{name}.gate_proj", hidden))
    return _project(weights, f"{name}.down_proj", gate * _project(weights, f"{name}.up_proj", hidden))


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = hidden.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype)


def _rotate(
    states: Float[Tensor, "rows heads new head_dim"], positions: Int[Tensor, " new"], theta: float
) -> Float[Tensor, "rows heads new head_dim"]:
    """Rotary positions; the pairs that turn together are (i, i + head_dim/2), as in Transformers checkpoints."""
    half = states.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, device=states.device, dtype=torch.float32) / half)
    angles = positions.float().unsqueeze(-1) * frequencies
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    left, right = states[..., :half], states[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
