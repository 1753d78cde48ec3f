"""What one weight sync moves, and how it is cut into flat buckets: plain data that both sides share.

A manifest is a list of tensors in the order in which they travel. Sender and receivers cut it in the same way, so
no sizes or offsets are ever exchanged. A tensor that is larger than a bucket travels in parts, so that the buffers
of both sides are as large as a bucket, whatever the model (`buffer_bytes`).

A manifest with a `base_version` is a partial one: it holds what changed since that version, and a receiver that is
at another version must refuse it. A manifest with an `adapter` holds low-rank updates that belong on top of the
receiver's weights of `base_version`, in place of any earlier ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_core.checks import check_number, check_whole

DEFAULT_BUCKET_BYTES = 64 << 20
INDEX_BYTES = 4
"""Sparse entries are numbered by int32."""
CHECKSUM_BYTES = 32
"""Two sums, the version and the bucket's number, as int64."""
_ALIGNMENT = 64  # bytes; keeps every view aligned for any dtype and for vector loads


def buffer_bytes(bucket_bytes: int) -> int:
    """The largest buffer that a bucket can need, in bytes, known before there is a manifest.

    >>> buffer_bytes(64 << 20) - (64 << 20), buffer_bytes(1)
    (32, 96)
    """
    check_whole("weight manifest: bucket_bytes", bucket_bytes, at_least=1)
    return _aligned(bucket_bytes) + CHECKSUM_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As in `torch.<dtype>`: "float32", "bfloat16", ..."""
    changed: int | None = None
    """None: all values travel. A number: only so many, each with its index into the flattened tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        if self.changed is not None:
            return self.values_offset + self.changed * self.torch_dtype.itemsize
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def values_offset(self) -> int:
        """Where the values of a sparse tensor start, behind its indices."""
        return _aligned((self.changed or 0) * INDEX_BYTES)

    def indices_and_values(self, travelled: Tensor) -> tuple[Tensor, Tensor]:
        """Indices [changed] int32 and values [changed] of a sparse tensor, views of the bytes that travelled."""
        indices = travelled[: (self.changed or 0) * INDEX_BYTES].view(torch.int32)
        return indices, travelled[self.values_offset :].view(self.torch_dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's own object."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"weight {self.name!r} has the dtype {self.dtype!r}, which torch does not know")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that travel in one flat byte buffer, with the offset of each; or a part of one large tensor."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int
    """Size of the buffer, checksum included."""
    index: int = 0
    """Number of the bucket in its manifest."""
    checksum: bool = False
    """The last `CHECKSUM_BYTES` are a checksum of the others."""
    part: tuple[int, int] | None = None
    """None: whole tensors. First byte and end of what the bucket holds of its only tensor, as that travels."""

    @property
    def is_last_part(self) -> bool:
        """Whether nothing of the bucket's tensors follows in a later one."""
        return self.part is None or self.part[1] == self.tensors[0].nbytes

    @property
    def payload_bytes(self) -> int:
        """Size without the checksum."""
        return self.nbytes - (CHECKSUM_BYTES if self.checksum else 0)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The whole dense tensors inside a byte buffer, without a copy."""
        for spec, offset in zip(self.tensors, self.offsets, strict=True):
            if spec.changed is None and self.part is None:
                yield spec.name, flat[offset : offset + spec.nbytes].view(spec.torch_dtype).view(spec.shape)

    def sparse_views(self, flat: Tensor) -> Iterator[tuple[TensorSpec, Tensor, Tensor]]:
        """Specification, indices [changed] int32 and values [changed] of the sparse tensors, without a copy."""
        for spec, offset in zip(self.tensors, self.offsets, strict=True):
            if spec.changed is not None and self.part is None:
                yield spec, *spec.indices_and_values(flat[offset : offset + spec.nbytes])


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterScale:
    """Rank and weight of low-rank updates: a layer's weight is W + alpha / rank * B A (arXiv:2106.09685)."""

    rank: int
    """Rows of every A and columns of every B."""
    alpha: float

    def __post_init__(self) -> None:
        check_whole("adapter: rank", self.rank, at_least=1)
        check_number("adapter: alpha", self.alpha, above=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """The tensors that one sync moves, in order, and how they are cut into buckets.

    >>> m = WeightManifest(version=3, bucket_bytes=96, tensors=(
    ...     TensorSpec(name="a", shape=(4,), dtype="float32"), TensorSpec(name="b", shape=(30,), dtype="bfloat16")))
    >>> [[t.name for t in bucket.tensors] for bucket in m.buckets()], m.total_bytes
    ([['a'], ['b']], 76)
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Upper bound on a bucket, rounded up to 64 bytes; a larger tensor travels in parts."""
    base_version: int | None = None
    """None: all weights. A number: what changed since that version; the rest stays as it is."""
    checksums: bool = False
    """Every bucket ends with a checksum that receivers compare."""
    keep_base: bool = False
    """Single values of these weights are to follow: a receiver that cannot read back what it holds keeps a copy in
    host memory."""
    adapter: AdapterScale | None = None
    """The tensors are those of an adapter, under the names of peft's files
    (`base_model.model.<layer>.lora_A.weight`, `lora_B`), for the weights of `base_version`: 0 means those that the
    model was loaded with."""
    other_way: bool = False
    """The last load of these weights was found wrong: a receiver that has more than one way of loading takes
    another one than usual. All weights come."""

    def __post_init__(self) -> None:
        check_whole("weight manifest: bucket_bytes", self.bucket_bytes, at_least=1)
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"weights named twice in one manifest: {', '.join(twice)}")
        if self.base_version is None and any(spec.changed is not None for spec in self.tensors):
            raise ValueError("a manifest with sparse tensors needs the base_version that they are changes to")
        if self.adapter is not None and self.base_version is None:
            raise ValueError("a manifest of an adapter needs the base_version of the weights that it belongs to")
        if self.other_way and self.base_version is not None:
            raise ValueError("a manifest for another way of loading brings all weights, so it has no base_version")

    @property
    def partial(self) -> bool:
        """Whether only the changes since `base_version` travel."""
        return self.base_version is not None

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, as they travel."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def digest(self) -> str:
        """Hash of all that decides the buckets: equal digests mean equal buckets on both sides."""
        content = repr(
            (
                self.bucket_bytes,
                self.checksums,
                [(t.name, t.shape, t.dtype, t.changed) for t in self.tensors],
            )
        )
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def buckets(self) -> list[Bucket]:
        """The tensors in order, cut into buckets."""
        cut: list[Bucket] = []
        tensors: list[TensorSpec] = []
        end = 0
        limit = max(self.bucket_bytes, _ALIGNMENT)
        for spec in self.tensors:
            if tensors and end + spec.nbytes > self.bucket_bytes:
                cut.append(self._bucket(len(cut), tensors))
                tensors, end = [], 0
            if spec.nbytes > limit:
                step = limit // _ALIGNMENT * _ALIGNMENT  # whole values of any dtype
                for start in range(0, spec.nbytes, step):
                    cut.append(self._part(len(cut), spec, start, min(start + step, spec.nbytes)))
                continue
            tensors.append(spec)
            end += _aligned(spec.nbytes)
        if tensors:
            cut.append(self._bucket(len(cut), tensors))
        return cut

    def _part(self, index: int, spec: TensorSpec, start: int, stop: int) -> Bucket:
        return Bucket(
            tensors=(spec,),
            offsets=(0,),
            nbytes=stop - start + (CHECKSUM_BYTES if self.checksums else 0),
            index=index,
            checksum=self.checksums,
            part=(start, stop),
        )

    def _bucket(self, index: int, tensors: list[TensorSpec]) -> Bucket:
        offsets, end = [], 0
        for spec in tensors:
            offsets.append(end)
            end += _aligned(spec.nbytes)
        return Bucket(
            tensors=tuple(tensors),
            offsets=tuple(offsets),
            nbytes=end + (CHECKSUM_BYTES if self.checksums else 0),
            index=index,
            checksum=self.checksums,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for control channels that carry nothing else."""
        return {
            "version": self.version,
            "bucket_bytes": self.bucket_bytes,
            "tensors": [[t.name, list(t.shape), t.dtype, t.changed] for t in self.tensors],
            "base_version": self.base_version,
            "checksums": self.checksums,
            "keep_base": self.keep_base,
            "other_way": self.other_way,
            **({} if (scale := self.adapter) is None else {"adapter": [scale.rank, scale.alpha]}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WeightManifest:
        """Inverse of `to_dict`."""
        return cls(
            version=data["version"],
            bucket_bytes=data["bucket_bytes"],
            tensors=tuple(
                TensorSpec(name=name, shape=tuple(shape), dtype=dtype, changed=changed)
                for name, shape, dtype, changed in data["tensors"]
            ),
            base_version=data["base_version"],
            checksums=data["checksums"],
            keep_base=data.get("keep_base", False),
            other_way=data.get("other_way", False),
            adapter=AdapterScale(rank=scale[0], alpha=scale[1]) if (scale := data.get("adapter")) else None,
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
