"""The weight-sync protocol: a manifest that both sides cut into the same buckets, then one flat buffer each.

    sender (all training ranks)                       receiver (each rollout worker)
    manifest = source.manifest(version) ───────────►  same manifest, so the same buckets
    for bucket: gather, pack into a flat buffer ───►  receive the buffer, hand out views, load them
    close                                             commit(version)

Names are checkpoint names. Every name travels exactly once; nothing is left over.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.transport import Receiver, Sender, Sending

DEFAULT_BUCKET_BYTES = 64 << 20
_ALIGNMENT = 64  # bytes; keeps every view aligned for any dtype and for vector loads


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As in `torch.<dtype>`: "float32", "bfloat16", ..."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's own object."""
        return getattr(torch, self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that travel in one flat byte buffer, with the offset of each."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors inside a byte buffer, without a copy."""
        for spec, offset in zip(self.tensors, self.offsets, strict=True):
            yield spec.name, flat[offset : offset + spec.nbytes].view(spec.torch_dtype).view(spec.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """What one sync moves.

    >>> m = WeightManifest(version=3, bucket_bytes=96, tensors=(
    ...     TensorSpec(name="a", shape=(4,), dtype="float32"), TensorSpec(name="b", shape=(30,), dtype="bfloat16")))
    >>> [[t.name for t in bucket.tensors] for bucket in m.buckets()], m.total_bytes
    ([['a'], ['b']], 76)
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Upper bound on a bucket, except that a larger tensor has a bucket of its own."""

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"weights named twice in one manifest: {', '.join(twice)}")

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def digest(self) -> str:
        """Hash of names, shapes, dtypes and bucket size: equal digests mean equal buckets on both sides."""
        content = repr((self.bucket_bytes, [(t.name, t.shape, t.dtype) for t in self.tensors]))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def buckets(self) -> list[Bucket]:
        """The tensors in order, cut into buckets."""
        cut: list[Bucket] = []
        tensors: list[TensorSpec] = []
        offsets: list[int] = []
        end = 0
        for spec in self.tensors:
            if tensors and end + spec.nbytes > self.bucket_bytes:
                cut.append(Bucket(tensors=tuple(tensors), offsets=tuple(offsets), nbytes=end))
                tensors, offsets, end = [], [], 0
            tensors.append(spec)
            offsets.append(end)
            end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        if tensors:
            cut.append(Bucket(tensors=tuple(tensors), offsets=tuple(offsets), nbytes=end))
        return cut

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for control channels that carry nothing else."""
        return {
            "version": self.version,
            "bucket_bytes": self.bucket_bytes,
            "tensors": [[t.name, list(t.shape), t.dtype] for t in self.tensors],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WeightManifest:
        """Inverse of `to_dict`."""
        return cls(
            version=data["version"],
            bucket_bytes=data["bucket_bytes"],
            tensors=tuple(TensorSpec(name=n, shape=tuple(s), dtype=d) for n, s, d in data["tensors"]),
        )


class WeightSource(Protocol):
    """The weights of a training engine. All ranks of the engine take part in every call."""

    def manifest(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """Names, full shapes and the dtypes they will be sent in."""
        ...

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """The bucket's tensors at full shape on the engine's device; valid until the next call.

        On ranks that do not send, the gather still takes part in the collective and may yield nothing.
        """
        ...


class ModuleWeights:
    """WeightSource of a module that lives unsharded in this process.

    `names` maps a parameter's name to its checkpoint name, or to None to leave it out.
    """

    def __init__(self, module: torch.nn.Module, names: Callable[[str], str | None] = lambda name: name) -> None:
        self._tensors = {
            mapped: parameter
            for name, parameter in module.named_parameters()
            if (mapped := names(name)) is not None
        }

    def manifest(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """See WeightSource; tied parameters appear once, under their first name."""
        return WeightManifest(
            version=version,
            bucket_bytes=bucket_bytes,
            tensors=tuple(
                TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
                for name, t in self._tensors.items()
            ),
        )

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """See WeightSource."""
        return [(spec.name, self._tensors[spec.name].detach()) for spec in bucket.tensors]


def send_weights(source: WeightSource, manifest: WeightManifest, sender: Sender | None) -> None:
    """Send every bucket of `manifest`; run by all ranks of the engine, `sender` being None on all but one.

    Two buffers alternate, so that the next bucket is gathered and packed while the last one is on its way.
    """
    buckets = manifest.buckets()
    size = max((bucket.nbytes for bucket in buckets), default=0)
    buffers: list[Tensor] = []
    pending: list[Sending | None] = [None, None]
    for index, bucket in enumerate(buckets):
        tensors = source.gather(bucket)
        if sender is None:
            for _ in tensors:
                pass
            continue
        slot = index % 2
        if len(buffers) <= slot:
            buffers.append(torch.empty(size, dtype=torch.uint8, device=sender.device))
        if (sending := pending[slot]) is not None:
            sending.wait()
        _pack(bucket, tensors, buffers[slot])
        pending[slot] = sender.send(buffers[slot][: bucket.nbytes])
    # Oldest first: the receiver takes them in the order of sending.
    for index in (len(buckets), len(buckets) + 1):
        if (sending := pending[index % 2]) is not None:
            sending.wait()


def _pack(bucket: Bucket, tensors: Iterable[tuple[str, Tensor]], flat: Tensor) -> None:
    """Copy the tensors into the buffer, casting to the manifest's dtypes; every name exactly once."""
    places = dict(bucket.views(flat))
    for name, tensor in tensors:
        if name not in places:
            raise WeightSyncError(f"weight {name!r} was gathered twice or is not in the bucket's manifest")
        place = places.pop(name)
        if place.shape != tensor.shape:
            raise WeightSyncError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, its manifest says {tuple(place.shape)}"
            )
        place.copy_(tensor)
    if places:
        raise WeightSyncError(f"weights missing from a gathered bucket: {', '.join(sorted(places))}")


def receive_weights(
    manifest: WeightManifest,
    receiver: Receiver,
    load: Callable[[Iterable[tuple[str, Tensor]]], None],
) -> None:
    """Receive every bucket and pass its (name, tensor) views to `load`.

    The views share one reused buffer: `load` must copy what it keeps.
    """
    buckets = manifest.buckets()
    size = max((bucket.nbytes for bucket in buckets), default=0)
    flat = torch.empty(size, dtype=torch.uint8, device=receiver.device)
    for bucket in buckets:
        receiver.receive(flat[: bucket.nbytes])
        load(bucket.views(flat))


def copy_into(module: torch.nn.Module) -> Callable[[Iterable[tuple[str, Tensor]]], None]:
    """A `load` that copies weights into a module with checkpoint names.

    Raises:
        WeightSyncError: a name the module does not have, or another shape.
    """
    targets = dict(module.named_parameters(remove_duplicate=False))

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                if name not in targets:
                    raise WeightSyncError(f"the generator's model has no weight {name!r}")
                if targets[name].shape != tensor.shape:
                    raise WeightSyncError(
                        f"weight {name!r}: generator has shape {tuple(targets[name].shape)}, "
                        f"trainer sends {tuple(tensor.shape)}"
                    )
                targets[name].copy_(tensor)

    return load


def check_coverage(manifest: WeightManifest, module: torch.nn.Module) -> None:
    """Refuse a manifest that would leave a parameter of `module` as it was.

    Raises:
        WeightSyncError: names the parameters that nothing is sent for. Tied ones count as covered by their twin.
    """
    sent = {spec.name for spec in manifest.tensors}
    groups: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    missing = sorted(min(names) for names in groups.values() if not names & sent)
    if missing:
        raise WeightSyncError(
            f"{len(missing)} weights of the generator are not in the sync, among them {', '.join(missing[:5])}; "
            "trainer and generator must be built from the same model"
        )
