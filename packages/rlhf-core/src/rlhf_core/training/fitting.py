"""How many tokens fit a micro-batch: a line through two measured passes, and what is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_core.data.batch import RUN_TOGETHER, Batch
from rlhf_core.errors import ResourceError
from rlhf_core.interfaces.training import FittedTokens

MOST_TOKENS = 16_384
"""Above it a micro-batch is hardly faster on any device, so no more are taken however many fit. (On hosts a few
hundred do, but for prompts that rows share, which are run once for each micro-batch.)"""
MARGINS = {"cuda": 0.15, "cpu": 0.5}
"""The share of what is free that a micro-batch leaves: on a GPU for the allocator's gaps, on a host for the other
processes, which take memory at times of their own."""
SHORTER = "shorten the rows (lengths.max_length), use gradient_checkpointing, more ranks, or a smaller model"
"""What to do where the longest rows do not fit."""
_STEP = 256
"""The number is rounded down to a multiple, so that it is the same where a little more or less is free."""
LEAST_TOKENS = {"cuda": 1024, "cpu": 256}
"""Tokens of the smaller trial. With few, what grows until the head's chunk is full counts as growing for ever,
which errs on the safe side; on a host, where a trial takes seconds, that is the better bargain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLine:
    """Bytes of a pass as a line over its tokens.

    >>> MemoryLine.through((1024, 3 << 20), (2048, 5 << 20))
    MemoryLine(fixed=1048576.0, per_token=2048.0)
    """

    fixed: float
    per_token: float

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> MemoryLine:
        """The line through two passes, each (tokens, bytes).

        Where memory grows faster than the tokens (the squares of some attentions) the line would start below zero;
        it then starts at zero, which makes it steeper.

        Raises:
            ValueError: both have the same number of tokens.
        """
        if large[0] <= small[0]:
            raise ValueError(f"two passes of {small[0]} and {large[0]} tokens; the second must have more")
        slope = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        if large[1] < slope * large[0]:
            return cls(fixed=0.0, per_token=slope)
        return cls(fixed=large[1] - slope * large[0], per_token=slope)

    def at(self, tokens: int) -> float:
        """Bytes of a pass over so many tokens."""
        return self.fixed + self.per_token * tokens


def fitting_tokens(line: MemoryLine, *, free: float, longest: int, most: int = MOST_TOKENS) -> int:
    """The most tokens whose pass fits into `free` bytes; at most `most`, at least those of the longest unit.

    >>> fitting_tokens(MemoryLine(fixed=1e6, per_token=1e5), free=1e9, longest=500)
    9984
    >>> fitting_tokens(MemoryLine(fixed=1e6, per_token=1e5), free=1e7, longest=500)
    500
    """
    fit = most if line.per_token == 0 else int(min(most, (free - line.fixed) // line.per_token))
    return max(longest, fit // _STEP * _STEP)


def trial_rows(batch: Batch, *, length: int, units: int) -> Batch:
    """Units made of those of a batch, each row exactly `length` tokens long.

    Tokens, masks and columns of a row are repeated as often as needed, each unit from another place on, so that no
    two share a prompt. Any loss that can take the batch can take these rows.
    """
    size = batch.rows_per_unit
    unit = torch.arange(units)
    rows = ((unit % batch.units)[:, None] * size + torch.arange(size)).flatten()
    starts = unit.repeat_interleave(size)[:, None]
    places = (torch.arange(length) + starts) % batch.lengths.clamp(min=1)[rows][:, None]

    def stretched(tensor: Tensor) -> Tensor:
        return tensor[rows[:, None], places] if tensor.dim() > 1 else tensor[rows]

    response_mask = stretched(batch.response_mask)
    response_mask[:, 0] = False  # nothing predicts the first token of a row
    return replace(
        batch,
        token_ids=stretched(batch.token_ids),
        attention_mask=torch.ones_like(response_mask),
        response_mask=response_mask,
        columns={name: stretched(column) for name, column in batch.columns.items() if name != RUN_TOGETHER},
        sample_ids=(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What one rank has measured."""

    place: str
    """Equal for ranks that share the memory."""
    line: MemoryLine
    free: float
    """Bytes that nobody uses, of the whole place."""


def trial_sizes(unit: int, *, least: int, most: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """(share of the length of a row, units) of the smaller pass of a trial and of the larger one.

    Args:
        unit: tokens of the longest unit of rows.
        least: tokens of the smaller pass, about, if units are shorter.
        most: tokens that a micro-batch may have at most.

    >>> trial_sizes(300, least=1024, most=16_384)
    ((1.0, 3), (1.0, 6))
    >>> trial_sizes(10_000, least=1024, most=16_384)   # no two in one micro-batch: half of one, and all of it
    ((0.5, 1), (1.0, 1))
    """
    if 2 * unit > most:
        return (0.5, 1), (1.0, 1)
    units = max(1, min(least, most // 2) // unit)
    return (1.0, units), (1.0, 2 * units)


def agreed_tokens(everyones: Sequence[RankMemory], *, longest: int, most: int, margin: float) -> FittedTokens:
    """What all ranks take: what fits on the rank where the fewest tokens do.

    Args:
        everyones: of every rank; those of one place share what is free there.
        longest: tokens of the longest unit of rows.
        most: tokens that a micro-batch may have at most.
        margin: the share of what is free that stays free.

    Raises:
        ResourceError: the longest unit does not fit on some rank, even with nothing left free.
    """
    places = [rank.place for rank in everyones]
    fits: list[FittedTokens] = []
    for rank in everyones:
        share, line = rank.free / places.count(rank.place), rank.line
        if line.at(longest) > share:
            raise ResourceError(
                f"not even one micro-batch of the longest rows fits: {longest} tokens need {mib(line.fixed)} + "
                f"{longest} x {line.per_token / 1024:,.1f} KiB = {mib(line.at(longest))}, and {mib(share)} are "
                f"free; {SHORTER}"
            )
        tokens = fitting_tokens(line, free=share * (1 - margin), longest=longest, most=most)
        fits.append(
            FittedTokens(tokens=tokens, fixed=int(line.fixed), per_token=int(line.per_token), free=int(share))
        )
    return min(fits, key=lambda fit: (fit.tokens, fit.free))


def mib(size: float) -> str:
    """Bytes in words.

    >>> mib(5 << 30)
    '5,120 MiB'
    """
    return f"{size / 2**20:,.0f} MiB"
