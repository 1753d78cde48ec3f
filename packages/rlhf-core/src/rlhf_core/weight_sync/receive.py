"""The receiving half of a sync: bucket after bucket, its checksum compared, its weights loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.progress import note_progress
from rlhf_core.weight_sync.checksum import compare_checksum
from rlhf_core.weight_sync.manifest import Bucket, TensorSpec, WeightManifest
from rlhf_core.weight_sync.source import LoadWeights
from rlhf_core.weight_sync.transports.transport import Receiver

Values = Callable[[str], Tensor]
"""The value that a weight has now."""
Places = Callable[[str], Tensor | None]
"""Where the values of a weight belong, if they may be written there one after the other."""


def receive_weights(
    manifest: WeightManifest,
    receiver: Receiver,
    load: LoadWeights,
    *,
    base: Values | None = None,
    place: Places | None = None,
) -> None:
    """Receive every bucket and pass its (name, tensor) pairs to `load`.

    The tensors lie in memory that is used again: `load` must copy what it keeps. A tensor that travels in parts is
    written to its `place`, or joined in host memory and then loaded like the others.

    Args:
        manifest: what the sender sends.
        receiver: an end that has joined the sender's link.
        load: takes the weights of a bucket.
        base: the value that a weight has now; needed where only single values of it travel.
        place: where a tensor that comes in parts can be written part by part, on any device; `load` is not called
            for it then. None, or a place of another shape, dtype or layout: not there.

    Raises:
        WeightSyncError: the sender is gone, or what came is not what the manifest says.
        DeadlineExceeded: nothing came in time.
    """
    buckets = manifest.buckets()
    joined = _JoinedParts(load, base, place)
    with contextlib.closing(receiver.receive(buckets)) as stream:  # type: ignore[type-var]
        for bucket, flat in _pairs(buckets, stream):
            if bucket.checksum:
                compare_checksum(manifest, bucket, flat)
            if bucket.part is not None:
                joined.take(bucket, flat)
            else:
                load(bucket.views(flat))
                load(_updated(spec, at, values, base) for spec, at, values in bucket.sparse_views(flat))
            note_progress("bytes", bucket.nbytes)


def _pairs(buckets: Sequence[Bucket], stream: Iterable[Tensor]) -> Iterable[tuple[Bucket, Tensor]]:
    # Not zip: the stream must be run to its end, where the receiver acknowledges.
    for index, flat in enumerate(stream):
        yield buckets[index], flat


class _JoinedParts:
    """Puts a tensor that travels in parts together again; there is one at a time."""

    def __init__(self, load: LoadWeights, base: Values | None, place: Places | None) -> None:
        self._load, self._base, self._place = load, base, place
        self._bytes: Tensor | None = None
        """All bytes of the tensor under way."""
        self._in_place = False

    def take(self, bucket: Bucket, flat: Tensor) -> None:
        (spec,) = bucket.tensors
        start, stop = bucket.part or (0, spec.nbytes)
        if start == 0:
            self._bytes = self._placed(spec)
            self._in_place = self._bytes is not None
        if self._bytes is None:
            self._bytes = torch.empty(spec.nbytes, dtype=torch.uint8)
        self._bytes[start:stop].copy_(flat[: stop - start])
        if not bucket.is_last_part:
            return
        whole, self._bytes = self._bytes, None
        if self._in_place:
            return
        if spec.changed is None:
            self._load([(spec.name, whole.view(spec.torch_dtype).view(spec.shape))])
        else:
            self._load([_updated(spec, *spec.indices_and_values(whole), self._base)])

    def _placed(self, spec: TensorSpec) -> Tensor | None:
        """The bytes of the tensor's place, if it has one that fits."""
        place = self._place(spec.name) if self._place is not None and spec.changed is None else None
        if place is None or tuple(place.shape) != spec.shape or place.dtype != spec.torch_dtype:
            return None
        return place.detach().view(-1).view(torch.uint8) if place.is_contiguous() else None


def _updated(spec: TensorSpec, indices: Tensor, values: Tensor, base: Values | None) -> tuple[str, Tensor]:
    """A whole tensor again from one of which single values travelled."""
    if base is None:
        raise WeightSyncError(f"this receiver takes whole tensors, but only changes of {spec.name!r} came")
    whole = base(spec.name).detach().to(spec.torch_dtype, copy=True).contiguous()
    if tuple(whole.shape) != spec.shape:
        raise WeightSyncError(f"weight {spec.name!r} has shape {tuple(whole.shape)} here, {spec.shape} came")
    whole.view(-1)[indices.long().to(whole.device)] = values.to(whole.device)
    return spec.name, whole
