"""Attention among the segments of a packed row in one call of a CUDA kernel: flash-attention, or FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import CapabilityError
from rlhf_core.model.attention.segments import AttentionTerms
from rlhf_core.model.packing import Layout, Segment


def varlen_segments(query: Tensor, key: Tensor, value: Tensor, layout: Layout, terms: AttentionTerms) -> Tensor:
    """See SegmentAttention; one flash-attention call with lengths of its own for queries and keys.

    A branch's keys are those of its prompt and its own, so its prompt's are gathered once more for each branch:
    memory for keys and values, no arithmetic. Where there are more keys than queries the causal mask and the window
    are aligned to the last of both, which is just what a branch needs.
    """
    if terms.sinks is not None:
        raise CapabilityError("flash-attention for segments of unequal length knows no attention sinks")
    if "varlen" not in layout.kept:
        layout.kept["varlen"] = varlen_arguments(layout.segments, query.device)
    gathered, lengths = layout.kept["varlen"]
    run = varlen_function()
    if run is None:
        raise CapabilityError("there is no flash-attention kernel for segments of unequal length")
    keys, values = (states[0].transpose(0, 1) for states in (key, value))
    if gathered is not None:
        keys, values = keys.index_select(0, gathered), values.index_select(0, gathered)
    return run(query[0].transpose(0, 1), keys, values, *lengths, terms)[None]


def varlen_arguments(segments: Sequence[Segment], device: torch.device) -> tuple[Tensor | None, tuple[Any, ...]]:
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
def varlen_function() -> Callable[..., Tensor] | None:
    """f(query, key, value, cumulative queries, cumulative keys, most queries, most keys, terms), or None."""
    if find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        def flash(*given: Any) -> Tensor:
            *arguments, terms = given
            more = {} if terms.soft_cap is None else {"softcap": terms.soft_cap}
            window = _flash_window(terms)
            return flash_attn_varlen_func(
                *arguments, softmax_scale=terms.scale, causal=True, window_size=window, **more
            )

        return flash
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn

    def from_torch(query: Tensor, key: Tensor, *given: Any) -> Tensor:
        *arguments, terms = given
        if terms.soft_cap is not None:
            raise CapabilityError("torch's attention for segments of unequal length knows no soft cap")
        grouped = query.shape[1] != key.shape[1]
        window = _flash_window(terms)
        return varlen_attn(query, key, *arguments, scale=terms.scale, window_size=window, enable_gqa=grouped)

    return from_torch


def _flash_window(terms: AttentionTerms) -> tuple[int, int]:
    """Flash-attention counts the keys before the query, without the query's own."""
    return (-1 if terms.window is None else terms.window - 1, 0)


def block_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    terms: AttentionTerms,
    *,
    compiled: bool = True,
) -> Tensor:
    """See SegmentAttention; one FlexAttention call. Not `compiled` it makes all scores: for tests on a CPU.

    A sink is put in afterwards: with s its score and z the log of the sum of the others' exponentials, the output
    shrinks by exp(z) / (exp(z) + exp(s)) = sigmoid(z - s).
    """
    place = f"blocks {terms.window}"
    if place not in layout.kept:
        layout.kept[place] = _block_mask(layout, query.shape[2], query.device, window=terms.window)
    output, log_sums = _flex(compiled, terms.soft_cap, terms.sinks is not None)(
        query,
        key,
        value,
        block_mask=layout.kept[place],
        scale=terms.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if terms.sinks is not None:
        kept = torch.sigmoid(log_sums - terms.sinks.view(1, -1, 1).to(log_sums))
        output = output * kept[..., None].to(output.dtype)
    return output.transpose(1, 2)


@lru_cache(maxsize=16)
def _flex(compiled: bool, soft_cap: float | None, log_sums: bool) -> Callable[..., tuple[Tensor, Any]]:
    """FlexAttention with this soft cap; the second result is the log of the sums of exponentials, if wanted."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    terms = AttentionTerms(soft_cap=soft_cap)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return terms.bend(score)

    def attend(*states: Tensor, **given: Any) -> tuple[Tensor, Any]:
        bend = None if soft_cap is None else capped
        if not log_sums:
            return flex_attention(*states, score_mod=bend, **given), None  # type: ignore[return-value]
        output, more = flex_attention(*states, score_mod=bend, return_aux=AuxRequest(lse=True), **given)
        return output, more.lse

    run: Any = torch.compile(attend, dynamic=True) if compiled else attend
    return run


def _block_mask(layout: Layout, tokens: int, device: torch.device, *, window: int | None) -> Any:
    """FlexAttention's mask of a packed row, from each token's segment, place and the ends of its prompt."""
    from torch.nn.attention.flex_attention import create_block_mask

    segments = layout.segments
    lengths = torch.tensor([s.stop - s.start for s in segments])
    columns = torch.tensor([[index, s.prompt_start, s.prompt_stop] for index, s in enumerate(segments)])
    segment, first, last = columns.repeat_interleave(lengths, dim=0).to(device).T.contiguous().unbind(0)
    # A branch goes on where its prompt ended, wherever the branch stands in the packed row.
    starts = torch.tensor([s.start - (s.prompt_stop - s.prompt_start) for s in segments])
    place = (torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)).to(device)

    def attends(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (segment[q] == segment[k]) & (q >= k)
        seen = own | ((k >= first[q]) & (k < last[q]))
        return seen if window is None else seen & (place[q] - place[k] < window)

    # Not compiled, it would hold a number for every pair of tokens.
    compiled = device.type == "cuda"
    return create_block_mask(attends, None, None, tokens, tokens, device=device, _compile=compiled)
