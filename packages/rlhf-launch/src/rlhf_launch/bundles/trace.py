"""What is known of a training step while it is taken, also of one that ends in an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rlhf_core import RaggedBatch, StepReport
from rlhf_rollout import ScoredGroup

Order = list[list[int]]
"""The rows of each minibatch, in the order in which they are trained on."""


@dataclass(kw_only=True, slots=True)
class StepTrace:
    """A step's inputs, and what came of them so far; filled by `Trainer.step`."""

    step: int
    """The step, counted from 1: the run had `step - 1` behind it."""
    groups: Sequence[ScoredGroup]
    kl_state: Mapping[str, Any] = field(default_factory=dict)
    """State of the KL controller before the step."""
    kl_coef: float | None = None
    batch: RaggedBatch | None = None
    """The samples with the columns that were added so far; None before they are scored."""
    pretraining: RaggedBatch | None = None
    """The text of all optimizer steps of the policy; given before the step, it is taken; else the stream's."""
    order: Order | None = None
    """Given before the step, it is followed; else it is what the plan drew."""
    reports: dict[str, list[StepReport]] = field(default_factory=dict)
    """Of each optimizer step, by role."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the step, without those that measure time."""
    error: BaseException | None = None
    """What ended it."""

    @property
    def faults(self) -> list[str]:
        """What is wrong with the step's numbers, in words: `advantages of 2 rows are not finite`."""
        return [*self._skipped(), *self._not_finite()]

    def _skipped(self) -> Iterator[str]:
        for role, reports in self.reports.items():
            skipped = sum(report.skipped for report in reports)
            if skipped:
                yield f"{skipped} optimizer step(s) of the {role} were skipped"

    def _not_finite(self) -> Iterator[str]:
        if self.batch is None:
            return
        masks = self.batch.per_token["response_mask"]
        for name, column in self.batch.per_token.items():
            if column.kind.kind == "f" and (rows := column.rows_not_finite(masks)):
                yield f"{name} of {rows} row(s) are not finite"
        for name, column in self.batch.per_row.items():
            if column.is_floating_point() and (rows := int((~torch.isfinite(column)).sum())):
                yield f"{name} of {rows} row(s) are not finite"
