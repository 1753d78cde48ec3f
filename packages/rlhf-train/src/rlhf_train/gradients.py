"""What DeepSpeed leaves to its caller: an optimizer to wrap, a gradient norm for stage 0, dropping gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from rlhf_core import EngineConfig, OptimizerConfig
from torch import nn


def build_optimizer(model: nn.Module, config: EngineConfig, *, on_host: bool) -> torch.optim.Optimizer:
    """AdamW over the trained parameters; matrices decay, norms and biases do not.

    On CUDA DeepSpeed's fused kernel (for state on the host its vectorised one) if it can be built, else torch's.
    """
    optimizer = config.optimizer or OptimizerConfig()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if _dimensions(p) > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if _dimensions(p) <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    arguments: dict[str, Any] = {"lr": optimizer.learning_rate, "betas": optimizer.betas, "eps": optimizer.eps}
    if config.device.startswith("cuda"):
        import deepspeed.ops.adam

        kernel = deepspeed.ops.adam.DeepSpeedCPUAdam if on_host else deepspeed.ops.adam.FusedAdam
        try:
            return kernel(groups, **arguments)
        except Exception as error:  # a missing compiler shows in many ways
            from deepspeed.utils import logger

            logger.warning(f"{kernel.__name__} cannot be built, using torch.optim.AdamW: {error}")
    return torch.optim.AdamW(groups, fused=True, **arguments)


def trained_elements(model: nn.Module) -> int:
    """Number of trained values, shards counted at full size."""
    return sum(math.prod(getattr(p, "ds_shape", p.shape)) for p in model.parameters() if p.requires_grad)


def _dimensions(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))


def set_learning_rate(engine: Any, rate: float) -> None:
    """Use `rate` in the next optimizer step."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


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
