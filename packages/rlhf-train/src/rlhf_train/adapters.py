"""Low-rank adapters: the model's own weights stay frozen, and leave the engine merged with their updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rlhf_core import ConfigError
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = 16
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get adapters; the heads never do."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora: rank must be at least 1, got {self.rank}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora: dropout must lie in [0, 1), got {self.dropout}")


def add_adapters(model: Any, config: LoraConfig, *, seed: int) -> None:
    """Put trainable adapters into `model`, in its own dtype; a scalar head stays trainable, all else is frozen.

    Raises:
        ConfigError: peft is not installed, or the target modules are not in the model.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("the option lora needs peft; install rlhf-train[lora]") from None
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        exclude_modules=["score", "classifier", "lm_head"],
    )
    try:
        # The same on all ranks: ZeRO 1 and 2 take for granted that they start equal.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise ConfigError(f"lora: target_modules {config.target_modules!r}: {error}") from error
    for name in ("score", "classifier"):
        if isinstance(head := getattr(model, name, None), nn.Module):
            head.requires_grad_(True)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Layers that have adapters, by their name in the model."""
    from importlib.util import find_spec

    if find_spec("peft") is None:
        return {}
    if not any(".lora_A." in name for name, _ in model.named_parameters()):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}


def merged(base: Tensor, layer: Any) -> Tensor:
    """A copy of the layer's weight with its update added, in float32 and back; parameters must be gathered."""
    total = base.float()
    for adapter in layer.active_adapters:
        total = total + layer.get_delta_weight(adapter).float()
    return total.to(base.dtype)
