"""A trainer with low-rank adapters, for tests: sends them merged, or by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import peft
import torch
from rlhf_core import AdapterScale, Bucket, TensorSpec, WeightManifest, WeightSource
from rlhf_core.testing.weight_sync import BUCKET_BYTES, Trainer
from torch import Tensor

PREFIX = "base_model.model."


class AdaptedTrainer(Trainer):
    """The model has adapters in place; its base weights never change."""

    def __init__(self, model_path: str, *, rank: int = 4, targets: str | list[str] = "all-linear") -> None:
        super().__init__(model_path)
        self.scale = AdapterScale(rank=rank, alpha=3.0 * rank)
        settings = peft.LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=targets)
        self.model = peft.inject_adapter_in_model(settings, self.model).eval()  # type: ignore[arg-type]
        self.perturb()

    def perturb(self, scale: float = 0.1) -> None:
        """Change both halves of every adapter."""
        with torch.no_grad():
            for parameter in self.adapter.values():
                parameter.add_(torch.randn(parameter.shape, generator=self._generator), alpha=scale)

    @property
    def adapter(self) -> dict[str, Tensor]:
        """Its tensors by the names of peft's files."""
        return {
            PREFIX + name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if ".lora_" in name
        }

    def adapter_manifest(self, version: int, *, base_version: int = 0) -> WeightManifest:
        """A manifest of the adapter alone."""
        tensors = tuple(
            TensorSpec(name=name, shape=tuple(t.shape), dtype="float32") for name, t in self.adapter.items()
        )
        return WeightManifest(
            version=version,
            tensors=tensors,
            bucket_bytes=BUCKET_BYTES,
            base_version=base_version,
            adapter=self.scale,
        )

    def manifest(self, version: int) -> WeightManifest:
        """A manifest of all weights, merged."""
        return Merged(self.model).manifest(version)


class OnlyAdapter(WeightSource):
    """Sends what `adapter_manifest` says."""

    def __init__(self, trainer: AdaptedTrainer) -> None:
        self._tensors = trainer.adapter

    def manifest(self, version: int, *, bucket_bytes: int = BUCKET_BYTES) -> WeightManifest:
        """Not asked for."""
        raise TypeError("take the trainer's manifest")

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """See WeightSource."""
        return [(spec.name, self._tensors[spec.name].detach()) for spec in bucket.tensors]


class Merged(WeightSource):
    """Sends all weights with the adapters' updates in them."""

    def __init__(self, model: Any) -> None:
        layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")}
        self._tensors: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if ".lora_" not in name:
                own = name.replace(".base_layer", "")
                update = layers.get(own.removesuffix(".weight"))
                plain = parameter.detach()
                self._tensors[own] = plain if update is None else plain + update.get_delta_weight("default")

    def manifest(self, version: int, *, bucket_bytes: int = BUCKET_BYTES) -> WeightManifest:
        """See WeightSource."""
        tensors = tuple(
            TensorSpec(name=name, shape=tuple(t.shape), dtype="float32") for name, t in self._tensors.items()
        )
        return WeightManifest(version=version, tensors=tensors, bucket_bytes=bucket_bytes)

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """See WeightSource."""
        return [(spec.name, self._tensors[spec.name]) for spec in bucket.tensors]
