"""Rows of a batch as one unpadded row of tokens, in which a prompt that several rows share stands once.

    rows            packed                     segments (queries -> keys)
    a b c           a b | c | d e | x y        prompt  a b   -> a b
    a b d e                                    branch  c     -> a b c
    x y                                        branch  d e   -> a b d e
                                               row     x y   -> x y

Positions count on from the prompt in every branch, so a branch sees just what it would see in a row of its own,
and attention costs the sum of the segments' squares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf_core.data.batch import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive tokens that attend to the prompt they continue, if any, and causally to themselves.

    A prompt is a segment of its own, before those that continue it.
    """

    start: int
    stop: int
    prompt_start: int = 0
    prompt_stop: int = 0
    """Equal to `prompt_start` where there is no shared prompt."""

    @property
    def keys(self) -> int:
        """Number of tokens the last token of the segment attends to."""
        return self.stop - self.start + self.prompt_stop - self.prompt_start


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """How the tokens of a packed row attend; travels to the attention function as an argument."""

    segments: tuple[Segment, ...]
    """One after the other, without a gap: every token of the row is in one."""
    masks: dict[Hashable, Tensor] = field(default_factory=dict)
    """Causal masks that were needed so far, made once for all layers."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a kernel made of the segments, once for all layers, by its name."""

    def mask(self, queries: int, keys: int, like: Tensor, *, window: int | None = None) -> Tensor:
        """[queries, keys] additive causal mask of queries that belong to the last keys, within the window."""
        place = (queries, keys, window, like.dtype, like.device)
        if place not in self.masks:
            full = torch.full((queries, keys), float("-inf"), dtype=like.dtype, device=like.device)
            mask = full.triu(keys - queries + 1)
            self.masks[place] = mask if window is None else mask + full.tril(keys - queries - window)
        return self.masks[place]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """A batch as one row."""

    token_ids: Int[Tensor, "1 tokens"]
    position_ids: Int[Tensor, "1 tokens"]
    places: Int[Tensor, "rows length"]
    """Where each token of the batch is in the packed row; 0 in the padding."""
    layout: Layout


def pack(batch: Batch, *, share_prompts: bool = True) -> PackedRows:
    """Pack the rows of a batch; rows whose tokens before the first counted one are equal share these.

    Both kinds of row give the same hidden states, up to rounding, for every token of the batch.
    """
    lengths = batch.lengths.tolist()
    places = torch.zeros(batch.token_ids.shape, dtype=torch.long)
    taken: list[tuple[int, int, int]] = []  # row, first and last + 1 of its tokens, in packed order
    segments: list[Segment] = []
    end = 0
    for prompt, rows in _groups(batch, lengths, share_prompts):
        start = end
        if prompt:
            taken.append((rows[0], 0, prompt))
            end += prompt
            segments.append(Segment(start=start, stop=end))
        for row in rows:
            places[row, :prompt] = torch.arange(start, start + prompt)
            places[row, prompt : lengths[row]] = torch.arange(end, end + lengths[row] - prompt)
            if lengths[row] > prompt:
                taken.append((row, prompt, lengths[row]))
                stop = end + lengths[row] - prompt
                segments.append(Segment(start=end, stop=stop, prompt_start=start, prompt_stop=start + prompt))
                end = stop
    device = batch.token_ids.device
    return PackedRows(
        token_ids=torch.cat([batch.token_ids[row, first:last] for row, first, last in taken])[None],
        position_ids=torch.cat([torch.arange(first, last) for _, first, last in taken])[None].to(device),
        places=places.to(device),
        layout=Layout(segments=tuple(segments)),
    )


def _groups(batch: Batch, lengths: list[int], share_prompts: bool) -> list[tuple[int, list[int]]]:
    """(tokens of the shared prompt, rows); 0 for a row that shares nothing."""
    if not share_prompts:
        return [(0, [row]) for row in range(batch.rows)]
    counted = batch.response_mask.int()
    first = torch.where(counted.any(dim=1), counted.argmax(dim=1), batch.lengths).tolist()
    tokens = batch.token_ids.tolist()
    by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row in range(batch.rows):
        by_prompt[tuple(tokens[row][: min(first[row], lengths[row])])].append(row)
    groups: list[tuple[int, list[int]]] = []
    for prompt, rows in by_prompt.items():
        groups += [(len(prompt), rows)] if prompt and len(rows) > 1 else [(0, [row]) for row in rows]
    return groups
