"""A probe of loaded weights: a few fixed rows of tokens whose log-probs both ends of a sync compute.

Bytes that arrive whole can still be loaded wrongly, and a checksum cannot see it. So the sender's log-probs of the
probe, computed with the weights that it sends, are compared with those that the receiver computes with what it has
loaded. What is left between them is rounding: how large that may be depends on the numbers in which both compute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_core.checks import check_whole
from rlhf_core.errors import ConfigError

Precision = Literal["float32", "float16", "bfloat16", "quantized"]
"""In which numbers a model computes; `quantized` for weights, activations or cached states of 8 bits and less."""
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "bfloat16", "quantized")
"""From the finest to the coarsest."""

TokenRows = tuple[tuple[int, ...], ...]

_SEED = 20_240_229


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeGap:
    """How far two lists of log-probs of the same tokens lie apart, in nats; infinite where one is not finite."""

    mean: float
    median: float
    largest: float
    tokens: int

    @classmethod
    def between(cls, expected: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> ProbeGap:
        """The gap over all tokens of all rows.

        >>> ProbeGap.between([[-1.0, -2.0], [-3.0]], [[-1.0, -2.5], [-4.0]]).largest
        1.0
        """
        gaps = (_flat(expected) - _flat(found)).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        return cls(
            mean=float(gaps.mean()),
            median=float(gaps.median()),
            largest=float(gaps.max()),
            tokens=gaps.numel(),
        )

    def __str__(self) -> str:
        return (
            f"{self.mean:.2g} nats on average, {self.median:.2g} at the median and {self.largest:.2g} at most, "
            f"over {self.tokens} tokens"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeLimit:
    """The largest gap that rounding explains."""

    mean: float
    """Over all tokens: a fault that only some of them meet, such as one expert's, shows here."""
    median: float
    """Half of the tokens are at most this far off. Steadier than the mean, which a single router that changes its
    mind over rounding can double."""

    def allows(self, gap: ProbeGap) -> bool:
        """Whether rounding explains the gap.

        >>> ProbeLimit(mean=0.1, median=0.05).allows(ProbeGap(mean=0.09, median=0.06, largest=2.0, tokens=9))
        False
        """
        return gap.mean <= self.mean and gap.median <= self.median

    def calibrated(self, seen: ProbeGap, precision: Precision) -> ProbeLimit:
        """A tighter limit: some times the gap that a right load was seen to have, never above this limit.

        Args:
            seen: the gap of a load that this limit allowed.
            precision: the coarser of both sides.
        """
        floor = _FLOORS[precision]
        return ProbeLimit(
            mean=min(self.mean, max(floor.mean, _ROOM * seen.mean)),
            median=min(self.median, max(floor.median, _ROOM * seen.median)),
        )

    def __str__(self) -> str:
        return f"{self.mean:.2g} on average and {self.median:.2g} at the median"


_ROOM = 4.0
_ABSOLUTE: dict[Precision, ProbeLimit] = {
    "float32": ProbeLimit(mean=2e-2, median=1e-2),
    "float16": ProbeLimit(mean=0.2, median=0.1),
    "bfloat16": ProbeLimit(mean=0.5, median=0.3),
    "quantized": ProbeLimit(mean=1.0, median=0.6),
}
_FLOORS: dict[Precision, ProbeLimit] = {
    "float32": ProbeLimit(mean=1e-3, median=1e-4),
    "float16": ProbeLimit(mean=0.01, median=4e-3),
    "bfloat16": ProbeLimit(mean=0.1, median=0.03),
    "quantized": ProbeLimit(mean=0.2, median=0.1),
}


def probe_limit(precision: Precision) -> ProbeLimit:
    """What rounding can explain at most, for any model; docs/numbers.md has the measurements behind the numbers."""
    return _ABSOLUTE[precision]


def coarser(*precisions: Precision) -> Precision:
    """The coarsest of some precisions.

    >>> coarser("float32", "bfloat16")
    'bfloat16'
    """
    return max(precisions, key=PRECISIONS.index)


def probe_tokens(
    vocab_size: int, *, tokens: int, row_length: int, avoid: Collection[int] = (), seed: int = _SEED
) -> TokenRows:
    """Rows of tokens drawn evenly from a vocabulary, the same for the same arguments everywhere.

    Any token passes through all layers of a model. Tokens of all kinds pass through most experts of a mixture; see
    `tokens_for_experts`.

    Args:
        vocab_size: ids run from 0 to `vocab_size - 1`.
        tokens: how many at least, over all rows.
        row_length: of each row.
        avoid: ids that stand for something else than text, such as images.
        seed: of the draw.

    Raises:
        ConfigError: no row of two tokens can be had.
    """
    check_whole("weight probe: tokens", tokens, at_least=2)
    check_whole("weight probe: row_length", row_length, at_least=2)
    usable = torch.tensor([token for token in range(vocab_size) if token not in set(avoid)])
    if not usable.numel():
        raise ConfigError(f"weight probe: a vocabulary of {vocab_size} has no token that may be used")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(usable.numel(), (-(-tokens // row_length), row_length), generator=generator)
    return tuple(tuple(row) for row in usable[drawn].tolist())


def tokens_for_experts(experts: int, per_token: int) -> int:
    """Tokens by which a router that favours some experts is still likely to reach all `experts` of a layer.

    With an even choice an expert is missed by n tokens with probability (1 - per_token / experts)^n, which is e^-32
    at this n; an expert that is chosen eight times less often than the others is missed once in fifty layers.
    """
    return 32 * -(-experts // max(1, per_token))


def _flat(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)
