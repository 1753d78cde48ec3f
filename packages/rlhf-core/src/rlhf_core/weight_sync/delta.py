"""Sending only what changed since the last sync: whole tensors, or single values of them. Always exact.

`tensors` remembers a checksum of every tensor. Frozen layers, embeddings under LoRA and so on do not travel. An
engine that fuses tensors (query, key and value into one) can only take all of them, so what lies in the same
part of a layer travels together (`fused_group`).

`values` keeps a copy of all weights in the sender's host memory. Of a tensor in which few values changed, only
these travel, each with its index: with bfloat16 weights and the learning rates of RL most values round to what they
were. Receivers read the value that a weight has now, or keep a copy of all as well (`WeightCopy`).

Either way the receivers must hold the very version that the changes start from; a sync that nobody confirmed makes
the next one a full one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rlhf_core.errors import ConfigError
from rlhf_core.weight_sync.checksum import checksum
from rlhf_core.weight_sync.manifest import DEFAULT_BUCKET_BYTES, INDEX_BYTES, Bucket, TensorSpec, WeightManifest
from rlhf_core.weight_sync.source import GatheringSource, WeightSource

DeltaMode = Literal["tensors", "values"]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST_INDEX = 2**31 - 1


def fused_group(name: str) -> str:
    """The part of a layer that a weight belongs to; engines fuse tensors within it only.

    >>> fused_group("model.layers.3.self_attn.q_proj.weight")
    'model.layers.3.self_attn'
    >>> fused_group("model.layers.3.mlp.experts.7.up_proj.weight")
    'model.layers.3.mlp'
    >>> fused_group("model.embed_tokens.weight")
    'model.embed_tokens'
    """
    if (layer := re.match(r".*?\.\d+\.[^.]+", name)) is not None:
        return layer.group()
    return name.rpartition(".")[0] or name


class DeltaSource:
    """A WeightSource around another one, which all ranks of the engine hold and call in the same order.

    Args:
        source: the weights.
        mode: what travels of what changed: whole `tensors`, or single `values` (see the module).
        sends: whether this rank is the one that sends; the others keep no copies.
    """

    def __init__(self, source: WeightSource, *, mode: DeltaMode, sends: bool = True) -> None:
        if mode not in ("tensors", "values"):
            raise ConfigError(f"delta sync: mode must be 'tensors' or 'values', got {mode!r}")
        self._source = source
        self._mode = mode
        self._sends = sends
        self._base: int | None = None
        self._sums: dict[str, tuple[int, int]] = {}
        self._copies: dict[str, Tensor] = {}
        self._changes: dict[str, Tensor] = {}
        """Bytes of the sparse tensors of the sync under way."""
        self._from_copies = False

    def manifest(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """See WeightSource: all weights."""
        self._base = None
        self._from_copies = False
        manifest = self._source.manifest(version, bucket_bytes=bucket_bytes)
        return replace(manifest, keep_base=self._mode == "values")

    def changes(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """What changed since the confirmed version; all weights if there is none. Gathers all of them once.

        Only the manifest of the rank that sends is right; hand that one to all ranks.
        """
        base = self._base
        full = self.manifest(version, bucket_bytes=bucket_bytes)
        if base is None:
            return full
        self._changes.clear()
        specs: dict[str, TensorSpec] = {}
        for bucket in full.buckets():
            known = {spec.name: spec for spec in bucket.tensors}
            for name, tensor in self._source.gather(bucket):
                # Of a tensor that travels in parts, every part is gathered as a whole: compared once.
                looks = self._sends and bucket.is_last_part
                if looks and (spec := self._compare(known[name], tensor)) is not None:
                    specs[name] = spec
        if self._mode == "tensors":
            groups = {fused_group(name) for name in specs}
            specs = {spec.name: spec for spec in full.tensors if fused_group(spec.name) in groups}
        self._from_copies = self._mode == "values"
        changed = tuple(specs[spec.name] for spec in full.tensors if spec.name in specs)
        return replace(full, tensors=changed, base_version=base)

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """See WeightSource; of a manifest that `manifest` or `changes` gave last."""
        if self._from_copies:
            # The copies are up to date since `changes`: nothing is gathered twice.
            for spec in bucket.tensors if self._sends else ():
                yield spec.name, (self._copies if spec.changed is None else self._changes)[spec.name]
            return
        known = {spec.name: spec for spec in bucket.tensors}
        for name, tensor in self._source.gather(bucket):
            if self._sends and bucket.is_last_part:
                self._remember(known[name], tensor)
            yield name, tensor

    def end_sync(self) -> int:
        """See GatheringSource; what `changes` gathered counts too."""
        return self._source.end_sync() if isinstance(self._source, GatheringSource) else 0

    def confirm(self, version: int) -> None:
        """Every receiver is at `version` now: the next changes start from it."""
        self._base = version
        self._changes.clear()
        self._from_copies = False

    def _remember(self, spec: TensorSpec, tensor: Tensor) -> None:
        value = tensor.detach().to(spec.torch_dtype).contiguous()
        if self._mode == "tensors":
            self._sums[spec.name] = checksum(value)
        elif spec.name in self._copies:
            self._copies[spec.name].copy_(value)
        else:
            # Pinned, a GPU reads it at the speed of its bus, and with no thread of the host between.
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._copies[spec.name] = copy.copy_(value)

    def _compare(self, spec: TensorSpec, tensor: Tensor) -> TensorSpec | None:
        """How the tensor is to travel; None if it is what the receivers have. Brings the memory up to date."""
        value = tensor.detach().to(spec.torch_dtype).contiguous()
        if self._mode == "tensors":
            before, self._sums[spec.name] = self._sums.get(spec.name), checksum(value)
            return None if before == self._sums[spec.name] else spec
        copy = self._copies[spec.name]
        before = copy.to(value.device, non_blocking=True)  # compared where the weights are: only changes leave it
        bits = _INTEGERS[value.element_size()]  # equal bits, so that NaN and the sign of zero count too
        indices = (value.view(-1).view(bits) != before.view(-1).view(bits)).nonzero().view(-1)
        count = indices.numel()
        if count == 0:
            return None
        if count * (INDEX_BYTES + value.element_size()) >= spec.nbytes or value.numel() > _LARGEST_INDEX:
            copy.copy_(value)
            return spec
        changed, indices = value.view(-1)[indices].cpu(), indices.cpu()
        copy.view(-1)[indices] = changed
        sparse = TensorSpec(name=spec.name, shape=spec.shape, dtype=spec.dtype, changed=count)
        flat = torch.zeros(sparse.nbytes, dtype=torch.uint8)
        flat[: count * INDEX_BYTES].view(torch.int32).copy_(indices)
        flat[sparse.values_offset :].view(spec.torch_dtype).copy_(changed)
        self._changes[spec.name] = flat
        return sparse
