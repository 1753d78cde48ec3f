"""The engine's weights as a WeightSource: checkpoint names, shards gathered a bucket at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
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
    write_part,
)
from torch import Tensor, nn

from rlhf_train.model.load import gathered
from rlhf_train.weights.shards import collect, reachable

_PARTS = 2
"""Gathers per bucket."""


class ZeroWeights:
    """PackingSource and GatheringSource for any ZeRO stage; tied parameters appear once.

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
        self._targets: dict[str, list[str]] = {}
        """The other way round."""
        self._kept: dict[str, Tensor | None] = {}
        """By checkpoint name: what came with a parameter that an earlier bucket needed, and is still to go."""
        self._next_index = 0
        """Number of the bucket that goes on with the sync under way."""
        self._gathered_bytes = 0
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
                self._targets.setdefault(name, []).append(target)
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
        copies and the two buffers of the sender together stay within two and a half buckets, or one parameter that
        is larger. What a parameter gives to later buckets is kept until then, so each is gathered once in a sync.
        """
        self._turn_to(bucket)
        for name, tensor in self._tensors(bucket, [spec.name for spec in bucket.tensors]):
            if tensor is not None:
                yield name, tensor

    def packs(self, bucket: Bucket) -> bool:
        """See PackingSource."""
        return any(reachable(self._parameters[self._sources[spec.name]]) for spec in bucket.tensors)

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
        self._turn_to(bucket)
        direct = [spec for spec in bucket.tensors if self._direct(spec)]
        self._collect(bucket, direct, flat)
        others = sorted({spec.name for spec in bucket.tensors} - {spec.name for spec in direct})
        places = dict(bucket.views(flat)) if flat is not None else {}
        for name, tensor in self._tensors(bucket, others, sends=flat is not None):
            if flat is None or tensor is None:
                continue
            if bucket.part is not None:
                write_part(bucket, tensor, flat)
            else:
                places[name].copy_(tensor)

    def end_sync(self) -> int:
        """See GatheringSource."""
        self._kept.clear()
        gathered_bytes, self._gathered_bytes = self._gathered_bytes, 0
        return gathered_bytes

    def _turn_to(self, bucket: Bucket) -> None:
        """Drop what is kept for buckets that will not come: all of another sync, what a partial one leaves out."""
        if bucket.index == 0 or bucket.index != self._next_index:
            self._kept.clear()
        self._next_index = bucket.index + 1
        if self._kept:
            first = min(self._place(spec.name) for spec in bucket.tensors)
            self._kept = {name: tensor for name, tensor in self._kept.items() if self._place(name) >= first}

    def _place(self, name: str) -> int:
        """Number of the parameter that a tensor is made of."""
        return self._order[self._sources[name]]

    def _collect(self, bucket: Bucket, specs: Sequence[TensorSpec], flat: Tensor | None) -> None:
        """Bring shards straight to their places in the buffer."""
        parameters = [self._parameters[spec.name] for spec in specs]
        places: list[Tensor] | None = None
        part: slice | None = None
        if bucket.part is not None and specs:
            (spec,) = specs
            first, end = (edge // spec.torch_dtype.itemsize for edge in bucket.part)
            part = slice(first, end)
            if flat is not None:
                places = [flat[: bucket.payload_bytes].view(spec.torch_dtype)]
        elif flat is not None:
            views = dict(bucket.views(flat))
            places = [views[spec.name] for spec in specs]
        with torch.no_grad():
            collect(parameters, places, part)
        self._gathered_bytes += bucket.payload_bytes if part else sum(spec.nbytes for spec in specs)

    def _tensors(
        self, bucket: Bucket, names: Sequence[str], *, sends: bool = True
    ) -> Iterator[tuple[str, Tensor | None]]:
        """These tensors of the bucket, kept or gathered; None for each on a rank that has no use for them."""
        kept = [name for name in names if name in self._kept]
        missing = [name for name in names if name not in self._kept]
        for together in itertools.chain([kept], self._parts(missing, limit=bucket.nbytes // _PARTS)):
            if together is not kept:
                self._kept |= self._gather({self._sources[name]: None for name in together}, convert=sends)
            for name in together:
                tensor = self._kept[name]
                if bucket.part is not None and tensor is not None:
                    tensor = self._kept[name] = tensor.contiguous()  # once, not for every part
                yield name, tensor
                if bucket.is_last_part:
                    del self._kept[name]

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

    def _gather(self, sources: Iterable[str], *, convert: bool) -> dict[str, Tensor | None]:
        """All tensors of the checkpoint that are made of these parameters; without `convert` only their names."""
        names = list(sources)
        layers = {name: layer for name in names if (layer := self._layers.get(name.removesuffix(".weight")))}
        needed = [self._parameters[name] for name in names]
        needed += [p for layer in layers.values() for n, p in layer.named_parameters() if "lora_" in n]
        with torch.no_grad(), gathered(needed):
            self._gathered_bytes += sum(parameter.numel() * parameter.element_size() for parameter in needed)
            if not convert:
                return dict.fromkeys(target for name in names for target in self._targets[name])
            # ZeRO-3 drops its reference to the full tensors at the end; these keep them alive.
            full = {name: dequantized(self._parameters[name]) for name in names}
            full |= {name: merged_weight(full[name], layer) for name, layer in layers.items()}
            return dict(self._to_checkpoint(full))

    def _to_checkpoint(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._converted:
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, tensors)
