"""The end of a step: DeepSpeed's update, dropped gradients, the report, and when skipped steps stop a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from rlhf_core import Accumulated, Batch, EngineConfig, StepReport, TrainingDivergedError
from torch import nn

from rlhf_train.checkpoint.checkpoint import Progress
from rlhf_train.parallel.ranks import TrainingRanks


def update_weights(engine: Any, module: Any, *, dtype: str) -> tuple[float, bool]:
    """DeepSpeed's optimizer step; the gradient norm before clipping, and whether the weights changed.

    Raises:
        TrainingDivergedError: the loss scale of float16 training has reached its minimum.
    """
    if engine.zero_optimization_stage() == 0 and dtype == "float32":
        norm = _unsharded_gradient_norm(module.parameters())
        if not math.isfinite(norm):
            drop_gradients(engine)
            return norm, False
        engine.step()
        return norm, True
    try:
        engine.step()
    except Exception as error:
        if "loss scale" not in str(error):
            raise
        raise TrainingDivergedError(
            "the loss scale of float16 training is at its minimum and gradients are still not finite; use "
            "bfloat16, or lower the learning rate"
        ) from error
    if engine.optimizer.overflow:
        return math.nan, False
    return float(engine.get_global_grad_norm()), True


def _unsharded_gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Global norm of reduced gradients that every rank holds in full (stage 0)."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def drop_gradients(engine: Any) -> None:
    """Forget all gradients that were added up since the last optimizer step, wherever the stage keeps them.

    Mirrors what DeepSpeed's own optimizers do after an overflow.
    """
    optimizer = engine.optimizer
    engine.zero_grad()
    optimizer.zero_grad(set_to_none=True)
    stage = engine.zero_optimization_stage()
    if stage in (1, 2):
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for group in list(gradients):
                gradients[group] = None
        if optimizer.cpu_offload:
            optimizer._offload_accumulated_param_ids = set()
    if stage == 3:
        optimizer.averaged_gradients = {}
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        optimizer.reset_cpu_buffers()


class StepReports:
    """Makes the reports of one engine and counts its skipped steps."""

    def __init__(self, config: EngineConfig, ranks: TrainingRanks) -> None:
        self._config, self._ranks = config, ranks

    def done(self, batch: Batch, done: Accumulated, *, norm: float, rate: float) -> StepReport:
        """A step that changed the weights, or was frozen."""
        return self._report(batch, done, norm=norm, rate=rate)

    def skipped(
        self, batch: Batch, done: Accumulated, progress: Progress, *, norm: float, rate: float, counts: bool
    ) -> StepReport:
        """A step with a non-finite loss or gradient; the latter is blamed on all samples of the step.

        Raises:
            TrainingDivergedError: it `counts`, and is one too many in a row.
        """
        what = "gradient" if done.finite else "loss"
        ids = done.bad_sample_ids or self._everyones_ids(batch)
        progress.skipped_in_a_row += int(counts)
        if progress.skipped_in_a_row > self._config.max_skipped_steps:
            raise TrainingDivergedError(
                f"{progress.skipped_in_a_row} optimizer steps in a row had a non-finite loss or gradient "
                f"(allowed: {self._config.max_skipped_steps}); the last one a {what}, from {', '.join(ids)}. "
                "Lower the learning rate, or look at these samples"
            )
        return self._report(batch, done, norm=norm, rate=rate, skipped=True, ids=ids)

    def _report(
        self,
        batch: Batch,
        done: Accumulated,
        *,
        norm: float,
        rate: float,
        skipped: bool = False,
        ids: tuple[str, ...] = (),
    ) -> StepReport:
        (tokens,) = self._ranks.sum([batch.tokens])
        return StepReport(
            loss=done.loss,
            grad_norm=norm,
            learning_rate=rate,
            metrics={name: mean.value for name, mean in done.metrics.items()},
            skipped=skipped,
            bad_sample_ids=tuple(dict.fromkeys(ids)),
            tokens=int(tokens),
        )

    def _everyones_ids(self, batch: Batch) -> tuple[str, ...]:
        return tuple(name for part in self._ranks.gather(batch.sample_ids) for name in part)  # type: ignore
