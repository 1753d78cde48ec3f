"""One optimizer step over as many micro-batches as needed, with the same result however they are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rlhf_core.data.batch import Batch
from rlhf_core.interfaces.loss import Loss, Metric, ModelOutputs, merge_metrics, zero_outputs
from rlhf_core.model.expert_routing import NO_CHOICE
from rlhf_core.progress import note_progress
from rlhf_core.training.micro_batches import TokenBudget, cut_batch


class Ranks(Protocol):
    """The other data-parallel ranks, as far as accumulation needs them."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, in float64."""
        ...

    def max(self, value: int) -> int:
        """Largest value of all ranks."""
        ...

    def gather(self, value: object) -> list[object]:
        """Every rank's (picklable) value, on every rank, in rank order."""
        ...


@dataclass(frozen=True)
class OneRank:
    """A single process: nothing to reduce."""

    size: int = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def max(self, value: int) -> int:
        """The value itself."""
        return value

    def gather(self, value: object) -> list[object]:
        """The value itself."""
        return [value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulated:
    """The sums of the micro-batches of one step, over all ranks."""

    loss: float
    weight: float
    metrics: Mapping[str, Metric]
    bad_sample_ids: tuple[str, ...] = field(default=())
    """Rows of the micro-batches with a non-finite loss; gradients must then be thrown away."""

    @property
    def finite(self) -> bool:
        """True if every micro-batch had a finite loss."""
        return not self.bad_sample_ids


def accumulate(
    batch: Batch,
    loss: Loss,
    *,
    forward: Callable[[Batch, Sequence[str]], ModelOutputs],
    backward: Callable[[Tensor, bool], None],
    max_tokens: int | TokenBudget,
    ranks: Ranks | None = None,
) -> Accumulated:
    """Forward and backward over this rank's `batch`; gradients are those of the global mean loss.

    Args:
        batch: this rank's rows.
        loss: the loss function with its config.
        forward: runs the model on one micro-batch with gradients.
        backward: gets the scaled loss and whether it is the last micro-batch of the step. The scale assumes
            that gradients are *averaged* over ranks afterwards, as DDP and ZeRO do.
        max_tokens: tokens per micro-batch; a plain number counts padded ones.
        ranks: the other ranks; every rank runs the same number of micro-batches (collectives must match), the
            short ones repeat a micro-batch with weight zero.

    Stops at the first non-finite loss on any rank, on all ranks at once, and names the samples.
    """
    ranks = ranks or OneRank()
    pieces = [batch.select_units(units) for units in cut_batch(batch, max_tokens)]
    (weight,) = ranks.sum([loss.weight(batch)])
    count = ranks.max(len(pieces))
    scale = ranks.size / weight if weight else 0.0
    total, metrics = 0.0, []
    for index in range(count):
        idle = index >= len(pieces)
        piece = pieces[0] if idle else pieces[index]
        terms = loss(forward(piece, loss.outputs), piece)
        value = terms.total.detach().double().item()
        bad = () if math.isfinite(value) or idle else (piece.sample_ids or (f"micro-batch {index}",))
        everyones_bad = _flatten(ranks.gather(bad))
        if everyones_bad:
            return Accumulated(loss=math.nan, weight=weight, metrics={}, bad_sample_ids=everyones_bad)
        backward(terms.total * (0.0 if idle else scale), index == count - 1)
        note_progress("micro-batches")
        if not idle:
            total += value
            metrics.append(terms.metrics)
    (total,) = ranks.sum([total])
    merged = merge_metrics(ranks.gather(merge_metrics(metrics)))  # type: ignore[arg-type]
    return Accumulated(loss=total / weight if weight else 0.0, weight=weight, metrics=merged)


def _flatten(parts: Iterable[object]) -> tuple[str, ...]:
    return tuple(name for part in parts for name in part)  # type: ignore[attr-defined]


def score_in_micro_batches(
    batch: Batch,
    fields: Sequence[str],
    *,
    forward: Callable[[Batch, Sequence[str]], ModelOutputs],
    max_tokens: int | TokenBudget,
    ranks: Ranks | None = None,
) -> ModelOutputs:
    """Run the model forward; the outputs are detached, on the CPU and in the order of the batch's rows."""
    ranks = ranks or OneRank()
    cut = cut_batch(batch, max_tokens)
    result = {name: getattr(zero_outputs(batch, [name]), name).cpu() for name in fields}
    with torch.no_grad():
        for index in range(ranks.max(len(cut))):
            idle = index >= len(cut)
            units = cut[0] if idle else cut[index]
            outputs = forward(batch.select_units(units), fields)
            note_progress("micro-batches")
            if idle:
                continue
            rows = torch.tensor(
                [unit * batch.rows_per_unit + i for unit in units for i in range(batch.rows_per_unit)]
            )
            for name in fields:
                value = getattr(outputs, name).detach().cpu()
                result[name] = result[name].to(value.dtype)
                if not value.dim():
                    # One number per micro-batch; the mean over rows stands for the batch.
                    result[name] += value * len(rows) / batch.rows
                elif value.dim() > 1:
                    if name == "routed_experts" and not result[name].numel():
                        result[name] = value.new_full((*result[name].shape[:2], value.shape[2]), NO_CHOICE)
                    result[name][rows, : value.shape[1]] = value
                else:
                    result[name][rows] = value
    return ModelOutputs(**result)
