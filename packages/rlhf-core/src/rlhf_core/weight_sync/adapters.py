"""A model's adapters alone as a WeightSource: megabytes in place of the whole model.

The receiver adds them to weights of its own, those that both sides were loaded with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.adapters.lora import adapted_layers
from rlhf_core.adapters.quantized import is_quantized, outline
from rlhf_core.errors import ConfigError
from rlhf_core.weight_sync.manifest import (
    DEFAULT_BUCKET_BYTES,
    AdapterScale,
    Bucket,
    TensorSpec,
    WeightManifest,
)

_PREFIX = "base_model.model."
"""What peft's files begin every name with."""


class AdapterWeights:
    """WeightSource of a model's adapters, with the names of peft's files: `base_model.model.<layer>.lora_A.weight`.

    Args:
        model: a Transformers model with adapters.
        gathered: inside it, sharded parameters have their full values; None for a model that is whole.

    Raises:
        ConfigError: the model has no adapters, or trains what an adapter of one rank and scale cannot tell: other
            parameters, several adapters, 4-bit weights under them, layers that a checkpoint has in another layout.
    """

    def __init__(
        self, model: Any, *, gathered: Callable[[list[Any]], AbstractContextManager[Any]] | None = None
    ) -> None:
        self._gathered = gathered or nullcontext
        self._layers = adapted_layers(model)
        if not self._layers:
            raise ConfigError("adapter sync: the policy has no adapters; set lora, or sync all weights")
        if any(is_quantized(layer.get_base_layer().weight) for layer in self._layers.values()):
            raise ConfigError(
                "adapter sync: the policy's weights are in 4 bits, those of the rollout engines are not, and so an "
                "adapter means something else to each; sync all weights (adapters: merged)"
            )
        self._scale = _common_scale(self._layers)
        self._parameters: dict[str, nn.Parameter] = {}
        for name, layer in self._layers.items():
            own = _PREFIX + _checkpoint_name(model, name, layer)
            for half in ("lora_A", "lora_B"):
                (adapter,) = getattr(layer, half).values()
                self._parameters[f"{own}.{half}.weight"] = adapter.weight
        ours = {id(parameter) for parameter in self._parameters.values()}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in ours:
                raise ConfigError(
                    f"adapter sync: {name!r} is trained too and is no adapter; sync all weights (adapters: merged)"
                )

    def manifest(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """See WeightSource. The adapter belongs to version 0, the weights as they were loaded."""
        return WeightManifest(
            version=version,
            bucket_bytes=bucket_bytes,
            base_version=0,
            adapter=self._scale,
            tensors=tuple(
                TensorSpec(name=name, shape=tuple(like.shape), dtype=str(like.dtype).removeprefix("torch."))
                for name, parameter in self._parameters.items()
                for like in (outline(parameter),)
            ),
        )

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """See WeightSource. Every rank gets the tensors, in one collective."""
        wanted = {spec.name: self._parameters[spec.name] for spec in bucket.tensors}
        with torch.no_grad(), self._gathered(list(wanted.values())):
            # A sharded engine drops its reference to the full tensors at the end; these keep them alive.
            return [(name, parameter.detach()) for name, parameter in wanted.items()]


def _common_scale(layers: dict[str, Any]) -> AdapterScale:
    found = set()
    for name, layer in layers.items():
        if len(layer.active_adapters) != 1 or len(getattr(layer, "lora_A", ())) != 1:
            raise ConfigError(f"adapter sync: layer {name!r} must have one linear adapter; sync all weights")
        (adapter,) = layer.active_adapters
        found.add((int(layer.r[adapter]), float(layer.scaling[adapter])))
    if len(found) != 1:
        raise ConfigError(
            f"adapter sync: the layers' adapters differ in rank or scale, {sorted(found)}; sync all weights"
        )
    ((rank, scaling),) = found
    return AdapterScale(rank=rank, alpha=scaling * rank)


def _checkpoint_name(model: Any, name: str, layer: Any) -> str:
    """The layer's name in a checkpoint, which differs from that in the model for some architectures."""
    from transformers.core_model_loading import revert_weight_conversion

    weight = outline(layer.get_base_layer().weight)
    found = revert_weight_conversion(model, {f"{name}.weight": weight})
    ((target, tensor),) = found.items() if len(found) == 1 else (("", None),)
    if tensor is None or tensor.shape != weight.shape or not target.endswith(".weight"):
        raise ConfigError(
            f"adapter sync: layer {name!r} has another layout in checkpoints ({', '.join(found)}); sync all weights"
        )
    return target.removesuffix(".weight")
