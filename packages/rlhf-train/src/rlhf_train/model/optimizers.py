"""The optimizer that DeepSpeed wraps: AdamW, or Muon for hidden matrices and AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from rlhf_core import EngineConfig, OptimizerConfig
from torch import nn

_NO_MUON = ("embed", "lm_head", "score", "classifier")
"""Parts of names. What Muon does to a hidden matrix makes no sense for a table or for a head."""


def build_optimizer(model: nn.Module, config: EngineConfig, *, on_host: bool) -> torch.optim.Optimizer:
    """The optimizer over the trained parameters; matrices decay, norms and biases do not.

    On CUDA Adam is DeepSpeed's fused kernel (for state on the host its vectorised one) if it can be built, else
    torch's.
    """
    optimizer = config.optimizer or OptimizerConfig()
    if optimizer.kind == "muon":
        return _muon(model, config, optimizer)
    groups = _adam_groups([p for p in model.parameters() if p.requires_grad], optimizer)
    arguments: dict[str, Any] = {"lr": optimizer.learning_rate, "betas": optimizer.betas, "eps": optimizer.eps}
    if config.device.startswith("cuda"):
        import deepspeed.ops.adam

        kernel = deepspeed.ops.adam.DeepSpeedCPUAdam if on_host else deepspeed.ops.adam.FusedAdam
        try:
            return kernel(groups, **arguments)
        except Exception as error:  # a missing compiler shows as many kinds of error
            _warn(f"{kernel.__name__} cannot be built, using torch.optim.AdamW: {error}")
    return torch.optim.AdamW(groups, fused=True, **arguments)


def _adam_groups(parameters: list[nn.Parameter], optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in parameters if _dimensions(p) > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if _dimensions(p) <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _muon(model: nn.Module, config: EngineConfig, optimizer: OptimizerConfig) -> torch.optim.Optimizer:
    """DeepSpeed's Muon: its ZeRO stages gather each matrix's gradient and orthogonalise it before the update."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        parameter.use_muon = _takes_muon(name, parameter)  # type: ignore[attr-defined]
    matrices = [p for p in trained.values() if p.use_muon]  # type: ignore[attr-defined]
    others = [p for p in trained.values() if not p.use_muon]  # type: ignore[attr-defined]
    rate = optimizer.learning_rate
    own = rate if optimizer.muon_learning_rate is None else optimizer.muon_learning_rate
    adam = {"lr": rate, "betas": optimizer.betas, "eps": optimizer.eps, "use_muon": False}
    groups = [{**group, **adam} for group in _adam_groups(others, optimizer)]
    if matrices:
        muon = {"momentum": optimizer.muon_momentum, "weight_decay": optimizer.weight_decay, "use_muon": True}
        groups.append({"params": matrices, "lr": own, "rate_ratio": own / rate if rate else 1.0, **muon})
    kernel: Callable[..., Any] | None = None
    if config.device.startswith("cuda"):
        from deepspeed.ops.adam import FusedAdam as kernel
    return MuonWithAuxAdam(
        groups, adam_optimizer=kernel, adam_optimizer_kwargs={"adam_w_mode": True}, fallback_to_inline=True
    )


def _takes_muon(name: str, parameter: nn.Parameter) -> bool:
    matrix = _dimensions(parameter) == 2 or (_dimensions(parameter) == 3 and ".experts." in name)
    return matrix and not any(part in name for part in _NO_MUON)


def _dimensions(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _warn(message: str) -> None:
    from deepspeed.utils import logger

    logger.warning(message)


def trained_elements(model: nn.Module) -> int:
    """Number of trained values, shards counted at full size."""
    return sum(math.prod(getattr(p, "ds_shape", p.shape)) for p in model.parameters() if p.requires_grad)


def set_learning_rate(engine: Any, rate: float) -> None:
    """Use `rate` in the next optimizer step; groups with a rate of their own keep its ratio."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate * group.get("rate_ratio", 1.0)
