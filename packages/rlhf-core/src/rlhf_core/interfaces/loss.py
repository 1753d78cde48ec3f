"""The contract between a loss function and a training engine.

A loss is an importable pure function `(outputs, batch, config) -> LossTerms`. It returns *sums* and the weight
that turns them into a mean; the engine divides by the weight of the whole global batch. So the result does not
depend on micro-batch size, packing, padding, accumulation steps or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_core.data.batch import Batch
from rlhf_core.data.pickled import reduced


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelOutputs:
    """A model's outputs for a batch. Fields that were not asked for are None.

    Per-token fields are aligned with `Batch.token_ids`; all but `routed_experts` are zero where `response_mask` is
    False.
    """

    log_probs: Float[Tensor, "rows length"] | None = None
    """log p(token_ids[t] | token_ids[<t]) at the batch's temperature."""
    entropy: Float[Tensor, "rows length"] | None = None
    """Entropy of the distribution that token t was drawn from, in nats."""
    log_collision: Float[Tensor, "rows length"] | None = None
    """log sum_v p(v)^2 over the distribution p that token t was drawn from: the log-probability that two tokens
    drawn there are the same one. No gradient."""
    values: Float[Tensor, "rows length"] | None = None
    """Critic's value of the state *before* token t, V(token_ids[<t])."""
    scores: Float[Tensor, " rows"] | None = None
    """Reward model's score of the whole row."""
    candidate_log_probs: Float[Tensor, "rows length k"] | None = None
    """Log-probs of the k tokens per position that the batch's column `candidate_ids` [rows, length, k] names."""
    aux_loss: Float[Tensor, ""] | None = None
    """Router load-balancing loss of a mixture-of-experts model."""
    routed_experts: Int[Tensor, "rows length choices"] | None = None
    """Experts each token went through, those of the first layer first; -1 in the padding. As the batch's column of
    this name they are chosen again (see `rlhf_core.model.expert_routing`)."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self, protocol)

    def of_rows(self, rows: slice, *, width: int) -> ModelOutputs:
        """The outputs of these rows alone, those per token cut to `width` tokens; what is of no row stays."""
        found: dict[str, Tensor] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and value.dim():
                value = value[rows, :width] if value.dim() > 1 else value[rows]
            if value is not None:
                found[item.name] = value
        return ModelOutputs(**found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A metric as a sum and a weight, so that parts of a batch add up exactly."""

    total: float
    weight: float

    @property
    def value(self) -> float:
        """The mean; 0 if nothing was counted."""
        return self.total / self.weight if self.weight else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """A metric that is the largest of the parts of a batch."""

    value: float


Metric = Mean | Largest
"""A number of which the parts of a batch make the batch's."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossTerms:
    """A loss as a sum and its weight. The optimised quantity is sum(total) / sum(weight) over the global batch.

    `weight` may depend on the batch alone, not on the model's outputs: the engine asks for it before the first
    backward pass. It checks that the two agree.
    """

    total: Float[Tensor, ""]
    weight: Float[Tensor, ""]
    metrics: Mapping[str, Metric] = field(default_factory=dict)


_CACHED = 1 << 18
"""Numbers that are worked on at a time."""

LossFunction = Callable[[ModelOutputs, Batch, Any], LossTerms]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss function with its frozen config: picklable, so that it travels to remote workers.

    >>> Loss(function=my_loss, config=MyConfig(clip_range=0.2))          # doctest: +SKIP
    """

    function: LossFunction
    """A module-level function, so that it can be found again in another process."""
    config: Any = None
    outputs: tuple[str, ...] = ("log_probs",)
    """The fields of `ModelOutputs` the function needs."""

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """Call the function with its config."""
        return self.function(outputs, batch, self.config)

    def weight(self, batch: Batch) -> float:
        """The weight of a batch, found by calling the function with all-zero outputs; no model is run."""
        with torch.no_grad():
            return float(self(zero_outputs(batch, self.outputs), batch).weight)


def zero_outputs(batch: Batch, names: Sequence[str]) -> ModelOutputs:
    """Outputs of the right shapes with nothing but zeros."""
    per_token = torch.zeros(batch.token_ids.shape, device=batch.token_ids.device)
    shapes = {"scores": per_token[:, 0], "aux_loss": per_token.sum()}
    if "routed_experts" in names:
        shapes["routed_experts"] = per_token.new_zeros(*per_token.shape, 0, dtype=torch.int16)
    if "candidate_ids" in batch:
        shapes["candidate_log_probs"] = torch.zeros_like(batch["candidate_ids"], dtype=per_token.dtype)
    return ModelOutputs(**{name: shapes.get(name, per_token) for name in names})


def mean_of(values: Tensor, mask: Tensor | None = None) -> Mean:
    """Metric from a tensor: its masked sum and the number of counted elements."""
    values = values.detach()
    if mask is None:
        return Mean(total=float(values.float().sum()), weight=float(values.numel()))
    parts = zip(row_parts(values), row_parts(mask.expand_as(values)), strict=True)
    total = sum(float(part.float().masked_fill(~counted, 0).sum()) for part, counted in parts)
    return Mean(total=total, weight=float(mask.count_nonzero()))


def mean_by_parts(values_of: Callable[..., Tensor], mask: Tensor, *columns: Tensor) -> Mean:
    """`mean_of(values_of(*columns), mask)`, for values that are each row's own; see `row_parts`."""
    means = [
        mean_of(values_of(*parts), counted)
        for counted, *parts in zip(row_parts(mask), *map(row_parts, columns), strict=True)
    ]
    return Mean(total=sum(mean.total for mean in means), weight=sum(mean.weight for mean in means))


def row_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor [rows, ...] in parts of as many rows as a processor's cache holds; the whole of a small one.

    What is computed of a whole batch of a step, part by part, needs no further memory of its size.
    """
    if tensor.numel() <= _CACHED:
        return (tensor,)
    return tensor.split(max(1, _CACHED * len(tensor) // tensor.numel()))


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Put the metrics of micro-batches or ranks together: means add up, of the largest the largest is taken.

    Raises:
        TypeError: one part has a mean where another has a largest number.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _merged(merged[name], metric) if name in merged else metric
    return merged


def _merged(one: Metric, other: Metric) -> Metric:
    if isinstance(one, Mean) and isinstance(other, Mean):
        return Mean(total=one.total + other.total, weight=one.weight + other.weight)
    if isinstance(one, Largest) and isinstance(other, Largest):
        return Largest(value=max(one.value, other.value))
    raise TypeError(f"parts of one metric must be of one kind, got {one} and {other}")
