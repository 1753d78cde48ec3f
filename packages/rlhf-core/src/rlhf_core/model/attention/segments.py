"""Attention among the segments of a packed row in plain torch: the kernel that runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_core.model.packing import Layout

_WINDOW_BLOCK = 512
"""Queries that attend together under a sliding window: no more keys than these and the window are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionTerms:
    """What a layer does with its scores: cap * tanh(scale * q k / cap), within a window, beside a sink."""

    scale: float | None = None
    """None for 1 / sqrt(head_dim)."""
    window: int | None = None
    """Keys that a query may attend to, itself included; None for all before it."""
    soft_cap: float | None = None
    sinks: Float[Tensor, " heads"] | None = None
    """A score per head that takes its share of the softmax and gives nothing to the output (gpt-oss)."""

    def bend(self, scores: Tensor) -> Tensor:
        """The scores under the soft cap."""
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)


class SegmentAttention(Protocol):
    """Attention of a packed row: each segment's tokens to the prompt it continues and causally to themselves.

    Raises:
        CapabilityError: the kernel does not know one of the terms.
    """

    def __call__(
        self,
        query: Float[Tensor, "1 heads tokens head_dim"],
        key: Float[Tensor, "1 key_heads tokens head_dim"],
        value: Float[Tensor, "1 key_heads tokens head_dim"],
        layout: Layout,
        terms: AttentionTerms,
    ) -> Float[Tensor, "1 tokens heads head_dim"]:
        """The output."""
        ...


def sdpa_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    terms: AttentionTerms,
    *,
    dropout: float = 0.0,
) -> Tensor:
    """See SegmentAttention; one `scaled_dot_product_attention` per segment. The only kernel with dropout."""
    if query.is_cuda:
        # With a mask, grouped heads would fall back to the unfused kernel on CUDA.
        key, value = _ungrouped(query, key, value)
    # The backward pass of one split is one copy; that of a slice writes zeros for all the other tokens, too.
    lengths = [segment.stop - segment.start for segment in layout.segments]
    pieces = zip(*(whole.split(lengths, dim=2) for whole in (query, key, value)), strict=True)
    prompts: dict[int, tuple[Tensor, Tensor]] = {}
    parts = []
    for segment, (queries, keys, values) in zip(layout.segments, pieces, strict=True):
        prompts[segment.start] = keys, values
        first = segment.prompt_start
        if terms.window is not None:  # the prompt's tokens that no query of the segment reaches
            first = max(first, segment.prompt_stop - terms.window + 1)
        if segment.prompt_stop > first:
            reached = slice(first - segment.prompt_start, segment.prompt_stop - segment.prompt_start)
            keys, values = (
                torch.cat([prompt[:, :, reached], own], dim=2)
                for prompt, own in zip(prompts[segment.prompt_start], (keys, values), strict=True)
            )
        parts.append(_causal(queries, keys, values, layout, terms, dropout=dropout))
    return torch.cat(parts, dim=2).transpose(1, 2)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, terms: AttentionTerms, *, dropout: float
) -> Tensor:
    """[1, heads, queries, head_dim] of queries that belong to the last of the keys."""
    queries, keys = query.shape[2], key.shape[2]
    window = terms.window if terms.window is not None and terms.window < keys else None
    if window is None:
        if queries == keys and terms.soft_cap is None and terms.sinks is None:
            return scaled_dot_product_attention(
                *(query, key, value),
                dropout_p=dropout,
                is_causal=True,
                scale=terms.scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        return masked_attention(query, key, value, layout.mask(queries, keys, query), terms, dropout=dropout)
    parts = []
    for start in range(0, queries, _WINDOW_BLOCK):
        stop = min(start + _WINDOW_BLOCK, queries)
        last = keys - queries + stop
        first = max(0, keys - queries + start - window + 1)
        mask = layout.mask(stop - start, last - first, query, window=window)
        seen = slice(first, last)
        parts.append(
            masked_attention(
                query[:, :, start:stop], key[:, :, seen], value[:, :, seen], mask, terms, dropout=dropout
            )
        )
    return torch.cat(parts, dim=2)


def masked_attention(
    query: Float[Tensor, "rows heads queries head_dim"],
    key: Float[Tensor, "rows key_heads keys head_dim"],
    value: Float[Tensor, "rows key_heads keys value_dim"],
    mask: Tensor | None,
    terms: AttentionTerms,
    *,
    dropout: float = 0.0,
) -> Float[Tensor, "rows heads queries value_dim"]:
    """Attention under a mask (additive, or True where a query attends), which holds the window already."""
    if terms.soft_cap is not None:
        return _capped_attention(query, key, value, mask, terms, dropout=dropout)
    if terms.sinks is not None:
        # One more key, of zeros: its score is the sink alone, and its value adds nothing.
        key, value = (torch.cat([part, torch.zeros_like(part[:, :, :1])], dim=2) for part in (key, value))
        mask = _with_sinks(_additive(mask, query, key.shape[2] - 1), terms.sinks)
    return scaled_dot_product_attention(
        *(query, key, value),
        attn_mask=mask,
        dropout_p=dropout,
        scale=terms.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, terms: AttentionTerms, *, dropout: float
) -> Tensor:
    """All scores at once: no fused kernel of torch bends them."""
    key, value = _ungrouped(query, key, value)
    scale = query.shape[-1] ** -0.5 if terms.scale is None else terms.scale
    scores = terms.bend(query @ key.transpose(2, 3) * scale)
    scores = scores + _additive(mask, query, key.shape[2])
    if terms.sinks is not None:
        scores = torch.cat([scores, terms.sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
    wide = torch.float64 if scores.dtype is torch.float64 else torch.float32
    shares = scores.softmax(dim=-1, dtype=wide).to(query.dtype)[..., : key.shape[2]]
    return torch.dropout(shares, dropout, train=True) @ value


def _additive(mask: Tensor | None, like: Tensor, keys: int) -> Tensor:
    """The mask as numbers to add to scores, [1 or rows, 1 or heads, queries, keys]."""
    if mask is None:
        return like.new_zeros(1, 1, like.shape[2], keys)
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, float("-inf"))
    return mask if mask.dim() == 4 else mask[None, None]


def _with_sinks(mask: Tensor, sinks: Tensor) -> Tensor:
    rows, _, queries, keys = mask.shape
    column = sinks.to(mask).view(1, -1, 1, 1).expand(rows, -1, queries, 1)
    return torch.cat([mask.expand(rows, len(sinks), queries, keys), column], dim=3)


def _ungrouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once per query head."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
