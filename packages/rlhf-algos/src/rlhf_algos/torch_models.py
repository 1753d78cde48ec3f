"""Loading a Transformers model for a role, with adapters and gradient checkpointing where asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rlhf_core import Bucket, ConfigError, EngineConfig, ModuleWeights, TensorSpec, WeightManifest
from rlhf_core.weights import DEFAULT_BUCKET_BYTES
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685); the model's own weights stay frozen."""

    rank: int = 16
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get adapters."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora: rank must be at least 1, got {self.rank}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOptions:
    """The `options` of EngineConfig that the torch engine reads."""

    lora: LoraConfig | None = None
    """Train adapters only; needs the extra `lora`."""
    packing: bool = True
    """Run sequences unpadded and shared prompts once where the model allows it."""
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    """More arguments for `from_pretrained`."""


def check_model_path(model: str, *, what: str = "model") -> None:
    """Refuse a path that cannot be a model, before anything is loaded.

    Raises:
        ConfigError: a directory without config.json, or a path that does not exist and is no hub name either.
    """
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError(
                f"{what} {model!r} is a directory without config.json; give one that save_pretrained wrote"
            )
    elif path.exists():
        raise ConfigError(f"{what} {model!r} is a file; give the directory that holds config.json")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise ConfigError(f"{what} {model!r} does not exist; give a directory with config.json or a hub name")


def load_model(config: EngineConfig, options: TorchOptions) -> nn.Module:
    """The model of `config.role` in training dtype on the CPU, with a seeded head where the checkpoint has none.

    Raises:
        ConfigError: there is no such model, or its files do not fit the role.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    check_model_path(config.model)
    causal = config.role in ("policy", "reference")
    auto: Any = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    extra: dict[str, Any] = {} if causal else {"num_labels": 1}
    if config.attention is not None:
        extra["attn_implementation"] = config.attention
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model, info = auto.from_pretrained(
                config.model,
                dtype=getattr(torch, config.dtype),
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                **extra,
                **options.model_arguments,
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {config.model!r} cannot be loaded as a {config.role}: {error}") from error
    if config.role == "critic" and any(key.startswith("score.") for key in info["missing_keys"]):
        # A fresh critic says 0 everywhere, so that the first advantages are the returns themselves.
        nn.init.zeros_(model.score.weight)
    return _adapt(model, config, options)


def _adapt(model: Any, config: EngineConfig, options: TorchOptions) -> nn.Module:
    """Frozen roles, LoRA and gradient checkpointing."""
    if config.optimizer is None:
        return model.requires_grad_(False)
    if options.lora is not None:
        try:
            import peft
        except ImportError:
            raise ConfigError("LoRA needs peft; install rlhf-algos[lora]") from None
        lora = options.lora
        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            peft.get_peft_model(
                model,
                peft.LoraConfig(
                    r=lora.rank,
                    lora_alpha=lora.alpha,  # type: ignore[arg-type]
                    lora_dropout=lora.dropout,
                    target_modules=targets,
                    exclude_modules=["score"] if hasattr(model, "score") else None,
                ),
            )
        if hasattr(model, "score"):
            model.score.requires_grad_(True)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class LoraWeights:
    """WeightSource of a model with adapters: its ordinary names, each with the adapter's update added."""

    def __init__(self, model: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._layers = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
        self._plain = ModuleWeights(model, self._checkpoint_name)

    def _checkpoint_name(self, name: str) -> str | None:
        owner = next((layer for layer in self._layers if name.startswith(layer + ".")), None)
        if owner is None:
            return name
        inner = name[len(owner) + 1 :]
        return f"{owner}.{inner.removeprefix('base_layer.')}" if inner.startswith("base_layer.") else None

    def manifest(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """See WeightSource."""
        return self._plain.manifest(version, bucket_bytes=bucket_bytes)

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """See WeightSource."""
        for name, tensor in self._plain.gather(bucket):
            layer: Any = self._layers.get(name.removesuffix(".weight"))
            if layer is None:
                yield name, tensor
                continue
            with torch.no_grad():
                merged = tensor.float()
                for adapter in layer.active_adapters:
                    merged = merged + layer.get_delta_weight(adapter).float()
                yield name, merged.to(tensor.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """All merged weights under their ordinary names."""
        specs: tuple[TensorSpec, ...] = self.manifest(0).tensors
        whole = Bucket(tensors=specs, offsets=(0,) * len(specs), nbytes=0)
        return dict(self.gather(whole))
