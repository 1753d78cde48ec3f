"""The engine's weights as a WeightSource: checkpoint names, shards gathered a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from rlhf_core import Bucket, ConfigError, TensorSpec, WeightManifest
from rlhf_core.weights import DEFAULT_BUCKET_BYTES
from torch import Tensor, nn

from rlhf_train.models import gathered


class ZeroWeights:
    """WeightSource for any ZeRO stage; tied parameters appear once.

    Transformers keeps some weights in another layout than their checkpoint (fused experts, for instance). They
    travel under the names and in the shapes that `save_pretrained` would write.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._converted = True
        self._sources: dict[str, str] = {}
        specs: list[TensorSpec] = []
        for name, parameter in self._parameters.items():
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            like = torch.empty(shape, dtype=parameter.dtype, device="meta")
            for target, tensor in self._to_checkpoint({name: like}).items():
                if target in self._sources:
                    raise ConfigError(
                        f"weight {target!r} of {type(model).__name__} is made of several parameters "
                        f"({self._sources[target]!r} and {name!r}); such layouts cannot be synchronised"
                    )
                self._sources[target] = name
                dtype = str(tensor.dtype).removeprefix("torch.")
                specs.append(TensorSpec(name=target, shape=tuple(tensor.shape), dtype=dtype))
        self._specs = tuple(specs)
        self._converted = any(target != source for target, source in self._sources.items())

    def manifest(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """See WeightSource."""
        return WeightManifest(version=version, bucket_bytes=bucket_bytes, tensors=self._specs)

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """See WeightSource. One collective for the whole bucket; every rank gets the tensors."""
        wanted = [spec.name for spec in bucket.tensors]
        names = list(dict.fromkeys(self._sources[name] for name in wanted))
        with torch.no_grad(), gathered([self._parameters[name] for name in names]):
            # ZeRO-3 drops its reference to the full tensors at the end; these keep them alive.
            full = {name: self._parameters[name].detach() for name in names}
            tensors = self._to_checkpoint(full)
        return [(name, tensors[name]) for name in wanted]

    def _to_checkpoint(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._converted:
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, tensors)
