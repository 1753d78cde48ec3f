"""What DeepSpeed leaves to its caller: a gradient norm for stage 0, and dropping gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def unsharded_gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
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
