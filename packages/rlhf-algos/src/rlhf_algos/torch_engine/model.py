"""Loading a Transformers model for a role, with adapters and gradient checkpointing where asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rlhf_core import (
    DEFAULT_BUCKET_BYTES,
    Bucket,
    ConfigError,
    EngineConfig,
    TensorSpec,
    WeightManifest,
    adapted_layers,
    add_adapters,
    dequantized,
    load_role,
    merged_weight,
    name_without_adapters,
    outline,
    tile_mlps,
    zero_linear_head,
)
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOptions:
    """The `options` of EngineConfig that the torch engine reads."""

    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    """More arguments for `from_pretrained`."""

    @classmethod
    def of(cls, config: EngineConfig) -> TorchOptions:
        """The options of a configuration that this engine can honour.

        Raises:
            ConfigError: says which setting it cannot honour, or which option it does not know.
        """
        if config.average_decay is not None:
            raise ConfigError(
                "the torch engine keeps no average of its weights; leave average_decay out, or use deepspeed"
            )
        if (size := config.sequence_parallel_size) > 1:
            raise ConfigError(
                f"the torch engine runs whole rows on a rank, got sequence_parallel_size={size}; leave it out, or "
                "use deepspeed"
            )
        if config.optimizer is not None and (kind := config.optimizer.kind) != "adamw":
            raise ConfigError(f"the torch engine optimises with adamw only, got optimizer kind {kind!r}")
        if config.trained and config.dtype == "float16":
            raise ConfigError("the torch engine does no loss scaling, as float16 needs it; write dtype: bfloat16")
        return config.options_as(cls, engine="torch")


def load_model(config: EngineConfig, options: TorchOptions) -> nn.Module:
    """The model of `config.role` in training dtype on the CPU, with a seeded head where the checkpoint has none.

    Raises:
        ConfigError: there is no such model, or its files do not fit the role.
        CheckpointError: a file of the model is damaged.
    """
    model, fresh = load_role(config, extra="rlhf-algos[qlora]", arguments=options.model_arguments)
    if config.role == "critic":
        for parameter in zero_linear_head(model, fresh):
            nn.init.zeros_(parameter)
    model = _adapt(model, config)
    if config.max_tokens_per_mlp_tile is not None:
        tile_mlps(model, config.max_tokens_per_mlp_tile)
    return model


def _adapt(model: Any, config: EngineConfig) -> nn.Module:
    """Frozen roles, LoRA and gradient checkpointing."""
    if config.optimizer is None:
        return model.requires_grad_(False)
    if config.lora is not None:
        add_adapters(model, config.lora, seed=config.seed, extra="rlhf-algos[lora]")
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class LoraWeights:
    """WeightSource of a model with adapters or 4-bit weights: ordinary names and dtypes, updates added."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = adapted_layers(model)
        self._parameters = {
            own: parameter
            for name, parameter in model.named_parameters()
            if (own := name_without_adapters(name, self._layers)) is not None
        }

    def manifest(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """See WeightSource."""
        outlines = {name: outline(parameter) for name, parameter in self._parameters.items()}
        tensors = tuple(
            TensorSpec(name=name, shape=tuple(whole.shape), dtype=str(whole.dtype).removeprefix("torch."))
            for name, whole in outlines.items()
        )
        return WeightManifest(version=version, bucket_bytes=bucket_bytes, tensors=tensors)

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """See WeightSource."""
        with torch.no_grad():
            for spec in bucket.tensors:
                base = dequantized(self._parameters[spec.name])
                layer = self._layers.get(spec.name.removesuffix(".weight"))
                yield spec.name, base if layer is None else merged_weight(base, layer)

    def state_dict(self) -> dict[str, Tensor]:
        """All merged weights under their ordinary names."""
        specs: tuple[TensorSpec, ...] = self.manifest(0).tensors
        whole = Bucket(tensors=specs, offsets=(0,) * len(specs), nbytes=0)
        return dict(self.gather(whole))
