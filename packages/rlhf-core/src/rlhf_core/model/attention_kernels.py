"""Attention among the segments of a packed row, by whichever kernel is there.

`sdpa` runs anywhere: one call per segment. On CUDA `varlen` runs all segments in one flash-attention call, and
`blocks` in one FlexAttention call that skips the blocks no token attends to. All three compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_core.model.packing import Layout, Segment

Kernel = Literal["sdpa", "varlen", "blocks"]

_SMALLEST_BLOCK_HEAD = 16
"""FlexAttention's compiled kernels take no narrower heads."""


class SegmentAttention(Protocol):
    """Attention of a packed row: each segment's tokens to the prompt it continues and causally to themselves."""

    def __call__(
        self,
        query: Float[Tensor, "1 heads tokens head_dim"],
        key: Float[Tensor, "1 key_heads tokens head_dim"],
        value: Float[Tensor, "1 key_heads tokens head_dim"],
        layout: Layout,
        *,
        scale: float | None,
    ) -> Float[Tensor, "1 tokens heads head_dim"]:
        """The output."""
        ...


def kernels_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> Sequence[Kernel]:
    """Kernels that may run there, the fastest first; `sdpa` is always the last."""
    if device.type != "cuda":
        return ("sdpa",)
    found: list[Kernel] = []
    if dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and _varlen_function() is not None:
        found.append("varlen")
    if find_spec("triton") is not None and head_dim >= _SMALLEST_BLOCK_HEAD:
        found.append("blocks")
    return (*found, "sdpa")


def sdpa_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """See SegmentAttention; one `scaled_dot_product_attention` per segment. The only one with dropout."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda:
        # With a mask, grouped heads would fall back to the unfused kernel on CUDA.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    parts = []
    for segment in layout.segments:
        own = slice(segment.start, segment.stop)
        keys, values = key[:, :, own], value[:, :, own]
        branch = segment.prompt_stop > segment.prompt_start
        if branch:
            prompt = slice(segment.prompt_start, segment.prompt_stop)
            keys = torch.cat([key[:, :, prompt], keys], dim=2)
            values = torch.cat([value[:, :, prompt], values], dim=2)
        parts.append(
            scaled_dot_product_attention(
                query[:, :, own],
                keys,
                values,
                attn_mask=layout.branch_mask(segment, query) if branch else None,
                dropout_p=dropout,
                is_causal=not branch,
                scale=scale,
                enable_gqa=keys.shape[1] != query.shape[1],
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def varlen_segments(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scale: float | None = None
) -> Tensor:
    """See SegmentAttention; one flash-attention call with lengths of its own for queries and keys.

    A branch's keys are those of its prompt and its own, so its prompt's are gathered once more for each branch:
    memory for keys and values, no arithmetic. Where there are more keys than queries the causal mask is aligned to
    the last of both, which is just what a branch needs.
    """
    if "varlen" not in layout.kept:
        layout.kept["varlen"] = _varlen_arguments(layout.segments, query.device)
    gathered, lengths = layout.kept["varlen"]
    run = _varlen_function()
    if run is None:
        raise RuntimeError("there is no flash-attention kernel for segments of unequal length")
    keys, values = (states[0].transpose(0, 1) for states in (key, value))
    if gathered is not None:
        keys, values = keys.index_select(0, gathered), values.index_select(0, gathered)
    return run(query[0].transpose(0, 1), keys, values, *lengths, scale)[None]


def _varlen_arguments(segments: Sequence[Segment], device: torch.device) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Which keys stand where (None: as they are), and cumulative and largest lengths of queries and keys."""
    places = [
        torch.cat([torch.arange(s.prompt_start, s.prompt_stop), torch.arange(s.start, s.stop)]) for s in segments
    ]
    queries = torch.tensor([s.stop - s.start for s in segments])
    keys = torch.tensor([s.keys for s in segments])

    def cumulative(lengths: Tensor) -> Tensor:
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)

    gathered = None if torch.equal(queries, keys) else torch.cat(places).to(device)
    return gathered, (cumulative(queries), cumulative(keys), int(queries.max()), int(keys.max()))


@lru_cache(maxsize=1)
def _varlen_function() -> Callable[..., Tensor] | None:
    """f(query, key, value, cumulative queries, cumulative keys, most queries, most keys, scale), or None."""
    if find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        return lambda *given: flash_attn_varlen_func(*given[:-1], softmax_scale=given[-1], causal=True)
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
    return lambda query, key, *given: varlen_attn(
        query, key, *given[:-1], scale=given[-1], window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1]
    )


def block_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scale: float | None = None,
    compiled: bool = True,
) -> Tensor:
    """See SegmentAttention; one FlexAttention call. Not `compiled` it makes all scores: for tests on a CPU."""
    if "blocks" not in layout.kept:
        layout.kept["blocks"] = _block_mask(layout.segments, query.shape[2], query.device)
    run = _flex(compiled)
    grouped = query.shape[1] != key.shape[1]
    output = run(query, key, value, block_mask=layout.kept["blocks"], scale=scale, enable_gqa=grouped)
    return output.transpose(1, 2)


@lru_cache(maxsize=2)
def _flex(compiled: bool) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
    return run


def _block_mask(segments: Sequence[Segment], tokens: int, device: torch.device) -> Any:
    """FlexAttention's mask of a packed row, from each token's segment and the ends of that segment's prompt."""
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = torch.tensor([s.stop - s.start for s in segments])
    columns = torch.tensor([[index, s.prompt_start, s.prompt_stop] for index, s in enumerate(segments)])
    segment, first, last = columns.repeat_interleave(lengths, dim=0).to(device).T.contiguous().unbind(0)

    def attends(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (segment[q] == segment[k]) & (q >= k)
        return own | ((k >= first[q]) & (k < last[q]))

    # Not compiled, it would hold a number for every pair of tokens.
    compiled = device.type == "cuda"
    return create_block_mask(attends, None, None, tokens, tokens, device=device, _compile=compiled)


SEGMENT_ATTENTION: dict[Kernel, SegmentAttention] = {
    "sdpa": sdpa_segments,
    "varlen": varlen_segments,
    "blocks": block_segments,
}
"""The function of each kernel."""
