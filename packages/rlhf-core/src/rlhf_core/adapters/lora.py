"""Low-rank adapters: the model's own weights stay frozen, and leave an engine merged with their updates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rlhf_core.checks import check_choice, check_number, check_whole
from rlhf_core.errors import ConfigError

FourBit = Literal["nf4", "fp4"]
MODEL_HEADS = ("score", "classifier", "lm_head")
"""Modules that never get adapters; the scalar ones are trained in full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685); the model's own weights stay frozen.

    >>> LoraConfig(rank=8, alpha=16.0).quantize is None
    True
    """

    rank: int = 16
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get adapters; the heads never do."""
    quantize: FourBit | None = None
    """Hold the frozen linear layers in 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), with
    doubly quantised scales. A frozen engine with the same setting loads the same 4-bit weights: the reference that
    such a policy starts from."""

    def __post_init__(self) -> None:
        check_whole("lora: rank", self.rank, at_least=1)
        check_number("lora: alpha", self.alpha, above=0)
        check_number("lora: dropout", self.dropout, at_least=0, below=1)
        if not self.target_modules:
            raise ConfigError("lora: target_modules is empty; write names of linear layers, or all-linear")
        if self.quantize is not None:
            check_choice("lora: quantize", self.quantize, get_args(FourBit))


def add_adapters(model: Any, config: LoraConfig, *, seed: int, extra: str) -> None:
    """Put trainable adapters into `model`, in its own dtype; a scalar head stays trainable, all else is frozen.

    Args:
        model: a Transformers model.
        config: which adapters.
        seed: of their initial values, which are the same on all ranks.
        extra: what to install if peft is missing, for the message.

    Raises:
        ConfigError: peft is not installed, or the target modules are not in the model.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError(f"lora needs peft; install {extra}") from None
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        exclude_modules=list(MODEL_HEADS),
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
    if find_spec("peft") is None:
        return {}
    if not any(".lora_A." in name for name, _ in model.named_parameters()):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """A context in which the model computes as it did before `add_adapters`; nothing is changed by it.

    Adapters under 4-bit weights are switched off the same way: these then compute alone.
    """
    layers = list(adapted_layers(model).values())
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, needs_gradient in trained:  # peft freezes adapters that are off, and trains all that are on
            parameter.requires_grad_(needs_gradient)


def name_without_adapters(name: str, layers: Mapping[str, Any]) -> str | None:
    """A parameter's name in the model without adapters; None for a parameter of the adapters themselves."""
    owner = next((layer for layer in layers if name.startswith(layer + ".")), None)
    if owner is None:
        return name
    inner = name[len(owner) + 1 :]
    return f"{owner}.{inner.removeprefix('base_layer.')}" if inner.startswith("base_layer.") else None


def merged_weight(base: Tensor, layer: Any) -> Tensor:
    """A copy of the layer's weight with its update added, in float32 and back; parameters must be gathered."""
    total = base.float()
    for adapter in layer.active_adapters:
        total = total + layer.get_delta_weight(adapter).float()
    return total.to(base.dtype)
