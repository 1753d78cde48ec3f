"""The engine's weights as a WeightSource: checkpoint names, shards gathered a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from rlhf_core import (
    DEFAULT_BUCKET_BYTES,
    Bucket,
    ConfigError,
    TensorSpec,
    WeightManifest,
    WeightSyncError,
    adapted_layers,
    dequantized,
    merged_weight,
    name_without_adapters,
    outline,
)
from torch import Tensor, nn

from rlhf_train.model.load import gathered
from rlhf_train.weights.shards import collect, reachable

_PARTS = 2
"""Gathers per bucket."""


class ZeroWeights:
    """PackingSource for any ZeRO stage; tied parameters appear once.

    Transformers keeps some weights in another layout than their checkpoint (fused experts, for instance). They
    travel under the names and in the shapes that `save_pretrained` would write. Adapters are
    merged_weight, 4-bit weights put back to full precision.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = adapted_layers(model)
        self._parameters: dict[str, nn.Parameter] = {}
        """By the name the parameter has without adapters."""
        for name, parameter in model.named_parameters():
            if (own := name_without_adapters(name, self._layers)) is not None:
                self._parameters[own] = parameter
        self._order = {name: index for index, name in enumerate(self._parameters)}
        self._converted = True
        self._sources: dict[str, str] = {}
        """Checkpoint name to the parameter it is made of."""
        self._plain: set[str] = set()
        """Names of parameters that are in the checkpoint as they are here, but for adapters."""
        self._specs = tuple(self._describe())
        self._converted = len(self._plain) < len(self._specs)

    def _describe(self) -> Iterator[TensorSpec]:
        for name, parameter in self._parameters.items():
            like = outline(parameter)
            for target, tensor in self._to_checkpoint({name: like}).items():
                if target in self._sources:
                    raise ConfigError(
                        f"weight {target!r} of {type(self._model).__name__} is made of several parameters "
                        f"({self._sources[target]!r} and {name!r}); such layouts cannot be synchronised"
                    )
                self._sources[target] = name
                if tensor is like and target == name:
                    self._plain.add(name)
                dtype = str(tensor.dtype).removeprefix("torch.")
                yield TensorSpec(name=target, shape=tuple(tensor.shape), dtype=dtype)

    def manifest(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """See WeightSource."""
        return WeightManifest(version=version, bucket_bytes=bucket_bytes, tensors=self._specs)

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """See WeightSource. Every rank gets the tensors.

        Sharded parameters are gathered many at a time, a part of the bucket in one collective, so that the full
        copies and the two buffers of the sender together stay within two and a half buckets.
        """
        wanted = [spec.name for spec in bucket.tensors]
        for names in self._parts(wanted, limit=bucket.nbytes // _PARTS):
            yield from self._gather(names)

    def packs(self, bucket: Bucket) -> bool:
        """See PackingSource."""
        return any(self._direct(spec) for spec in bucket.tensors)

    def pack(self, bucket: Bucket, flat: Tensor | None) -> None:
        """See PackingSource. Rank 0 is the one that sends.

        Raises:
            WeightSyncError: another rank has the buffer.
        """
        rank = torch.distributed.get_rank()
        if (flat is not None) != (rank == 0):
            raise WeightSyncError(
                f"weights leave by training rank 0, but rank {rank} was called with{'out' if flat is None else ''} "
                "a sender; give the sender to rank 0 and None to the others"
            )
        places = dict(bucket.views(flat)) if flat is not None else {}
        direct = [spec.name for spec in bucket.tensors if self._direct(spec)]
        parameters = [self._parameters[name] for name in direct]
        with torch.no_grad():
            collect(parameters, [places[name] for name in direct] if flat is not None else None)
        others = sorted({spec.name for spec in bucket.tensors} - set(direct))
        for names in self._parts(others, limit=bucket.nbytes // _PARTS):
            for name, tensor in self._gather(names):
                if flat is not None:
                    places[name].copy_(tensor)

    def _direct(self, spec: TensorSpec) -> bool:
        """Whether the tensor is a parameter's values, whose shards can go straight to their places."""
        if spec.name not in self._plain or spec.name.removesuffix(".weight") in self._layers:
            return False
        parameter = self._parameters[spec.name]
        return spec.torch_dtype == parameter.dtype and reachable(parameter)

    def _parts(self, wanted: list[str], *, limit: int) -> Iterator[list[str]]:
        """Names whose parameters are gathered together; all that is made of one parameter stays together."""
        part: list[str] = []
        sources: set[str] = set()
        size = 0
        for name in sorted(wanted, key=lambda name: self._order[self._sources[name]]):
            source = self._sources[name]
            if source not in sources:
                parameter = self._parameters[source]
                nbytes = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
                if part and size + nbytes > limit:
                    yield part
                    part, sources, size = [], set(), 0
                sources.add(source)
                size += nbytes
            part.append(name)
        if part:
            yield part

    def _gather(self, wanted: list[str]) -> list[tuple[str, Tensor]]:
        names = list(dict.fromkeys(self._sources[name] for name in wanted))
        layers = {name: layer for name in names if (layer := self._layers.get(name.removesuffix(".weight")))}
        needed = [self._parameters[name] for name in names]
        needed += [p for layer in layers.values() for n, p in layer.named_parameters() if "lora_" in n]
        with torch.no_grad(), gathered(needed):
            # ZeRO-3 drops its reference to the full tensors at the end; these keep them alive.
            full = {name: dequantized(self._parameters[name]) for name in names}
            full |= {name: merged_weight(full[name], layer) for name, layer in layers.items()}
            tensors = self._to_checkpoint(full)
        return [(name, tensors[name]) for name in wanted]

    def _to_checkpoint(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._converted:
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, tensors)
