"""Sums and means over the True positions of a mask. An empty mask gives 0, never NaN."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor


def masked_sum(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Sum where `mask` is True. Masked positions may hold anything, NaN and infinity included."""
    kept = values.masked_fill(~mask, 0)
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Mean where `mask` is True; 0 where nothing is."""
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)
