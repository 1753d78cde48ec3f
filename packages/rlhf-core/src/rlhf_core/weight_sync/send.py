"""The sending half of a sync: gather bucket after bucket, pack each into a flat buffer, send."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.progress import note_progress
from rlhf_core.weight_sync.checksum import write_checksum
from rlhf_core.weight_sync.manifest import Bucket, WeightManifest
from rlhf_core.weight_sync.source import GatheringSource, PackingSource, WeightSource
from rlhf_core.weight_sync.transports.transport import Sender, Sending, closed_on_error


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReport:
    """What sending took on one rank."""

    bytes: int
    """Bytes of the tensors that travelled."""
    gathered_bytes: int
    """Bytes of the parameters that were gathered from all ranks for it; 0 for a source that does not count them."""
    seconds: float

    @property
    def gathered_per_sent(self) -> float:
        """1 where every parameter is gathered once; 0 where nothing was counted or sent."""
        return self.gathered_bytes / self.bytes if self.bytes else 0.0


def send_weights(source: WeightSource, manifest: WeightManifest, sender: Sender | None) -> SendReport:
    """Send every bucket of `manifest`; run by all ranks of the engine, `sender` being None on all but one.

    Two buffers alternate, so that the next bucket is gathered and packed while the last one is on its way; with
    what the source gathers at a time they are all the memory it takes. A PackingSource writes into the buffer
    itself. A bucket that is one tensor in the right form already, or a part of one, is sent from where it is. A
    sender that fails is closed.

    Raises:
        WeightSyncError: the source does not keep to its manifest, or a receiver is gone.
        DeadlineExceeded: receivers did not take the weights in time.
    """
    begin = time.perf_counter()
    gathered_bytes = 0
    try:
        _send_or_take_part(source, manifest, sender)
    finally:
        if isinstance(source, GatheringSource):
            gathered_bytes = source.end_sync()
    seconds = time.perf_counter() - begin
    return SendReport(bytes=manifest.total_bytes, gathered_bytes=gathered_bytes, seconds=seconds)


def _send_or_take_part(source: WeightSource, manifest: WeightManifest, sender: Sender | None) -> None:
    buckets = manifest.buckets()
    if sender is None:
        for bucket in buckets:
            _take_part(source, bucket, None)
        return
    gathered: list[Bucket] = []
    try:
        with closed_on_error(sender):
            _send(source, manifest, sender, gathered)
    except Exception:
        # The other ranks know nothing of the failure, and wait for this one in every gather that is left.
        with contextlib.suppress(Exception):
            for bucket in buckets[len(gathered) :]:
                _take_part(source, bucket, torch.empty(bucket.nbytes, dtype=torch.uint8, device=sender.device))
        raise


def _take_part(source: WeightSource, bucket: Bucket, flat: Tensor | None) -> None:
    """Gather with the other ranks, and send nothing; `flat` is where the rank that sends packs in vain."""
    if (packing := _packing(source, bucket)) is not None:
        packing.pack(bucket, flat)
    else:
        for _ in source.gather(bucket):
            pass
    note_progress("bytes", bucket.nbytes)


def _send(source: WeightSource, manifest: WeightManifest, sender: Sender, gathered: list[Bucket]) -> None:
    buckets = manifest.buckets()
    # Large tensors that travel alone are mostly sent in place and need no buffer.
    shared = [bucket.nbytes for bucket in buckets if len(bucket.tensors) > 1 or _packing(source, bucket)]
    pending: list[Sending | None] = [None, None]
    pair: list[Tensor] = []  # of this sync: a GPU's memory is given back at its end

    def buffer(slot: int, nbytes: int) -> Tensor:
        if not pair or pair[0].numel() < nbytes:
            pair[:] = sender.buffers(max([nbytes, *shared]))
        return pair[slot][:nbytes]

    for index, bucket in enumerate(buckets):
        slot = index % 2
        if (sending := pending[slot]) is not None:
            sending.wait()
        flat = _filled(source, bucket, sender.device, partial(buffer, slot, bucket.nbytes))
        gathered.append(bucket)
        if bucket.checksum:
            write_checksum(manifest, bucket, flat)
        pending[slot] = sender.send(flat, bucket)
        note_progress("bytes", bucket.nbytes)
        del flat
    # Oldest first: the receiver takes them in the order of sending.
    for index in (len(buckets), len(buckets) + 1):
        if (sending := pending[index % 2]) is not None:
            sending.wait()
    sender.finish()


def _filled(source: WeightSource, bucket: Bucket, device: torch.device, buffer: Callable[[], Tensor]) -> Tensor:
    """The bucket's bytes: in the buffer, or where the source has them."""
    if (packing := _packing(source, bucket)) is not None:
        flat = buffer()
        packing.pack(bucket, flat)
        return flat
    tensors = source.gather(bucket)
    if len(bucket.tensors) == 1:
        tensors = list(tensors)
        if (in_place := _in_place(bucket, tensors, device)) is not None:
            return in_place
    flat = buffer()
    _pack(bucket, tensors, flat)
    return flat


def _packing(source: WeightSource, bucket: Bucket) -> PackingSource | None:
    """The source, if it packs this bucket itself."""
    return source if isinstance(source, PackingSource) and source.packs(bucket) else None


def _in_place(bucket: Bucket, tensors: Sequence[tuple[str, Tensor]], device: torch.device) -> Tensor | None:
    """The bytes of the bucket's only tensor, if they can be sent as they are."""
    if bucket.checksum or len(tensors) != 1:
        return None
    ((name, tensor),) = tensors
    (spec,) = bucket.tensors
    start, stop = bucket.part or (0, spec.nbytes)
    as_is = (
        name == spec.name
        and (spec.changed is None or bucket.part is not None)
        and tensor.dtype == (spec.torch_dtype if spec.changed is None else torch.uint8)
        and tuple(tensor.shape) == (spec.shape if spec.changed is None else (spec.nbytes,))
        and tensor.device.type == device.type
        and tensor.is_contiguous()
        and stop - start == bucket.nbytes
    )
    return tensor.detach().reshape(-1).view(torch.uint8)[start:stop] if as_is else None


def _pack(bucket: Bucket, tensors: Iterable[tuple[str, Tensor]], flat: Tensor) -> None:
    """Copy the tensors into the buffer, casting to the manifest's dtypes; every name exactly once."""
    if bucket.part is not None:
        _pack_part(bucket, tensors, flat)
        return
    places = dict(bucket.views(flat))
    for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
        if spec.changed is not None:
            places[spec.name] = flat[offset : offset + spec.nbytes]
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


def _pack_part(bucket: Bucket, tensors: Iterable[tuple[str, Tensor]], flat: Tensor) -> None:
    """Copy a part of the bucket's only tensor to the beginning of the buffer."""
    (spec,) = bucket.tensors
    found = list(tensors)
    if [name for name, _ in found] != [spec.name]:
        names = ", ".join(name for name, _ in found) or "nothing"
        raise WeightSyncError(f"a part of weight {spec.name!r} was to be gathered, and {names} came")
    ((_, tensor),) = found
    write_part(bucket, tensor, flat)


def write_part(bucket: Bucket, tensor: Tensor, flat: Tensor) -> None:
    """Write the bucket's part of its only tensor to the beginning of a buffer, cast to the manifest's dtype.

    Raises:
        WeightSyncError: the tensor has another shape than the manifest says.
    """
    (spec,) = bucket.tensors
    start, stop = bucket.part or (0, spec.nbytes)
    expected = spec.shape if spec.changed is None else (spec.nbytes,)
    if tuple(tensor.shape) != expected:
        raise WeightSyncError(f"weight {spec.name!r} has shape {tuple(tensor.shape)}, its manifest says {expected}")
    place = flat[: stop - start]
    if spec.changed is not None:
        place.copy_(tensor[start:stop])
        return
    size = spec.torch_dtype.itemsize
    place.view(spec.torch_dtype).copy_(tensor.detach().reshape(-1)[start // size : stop // size])
