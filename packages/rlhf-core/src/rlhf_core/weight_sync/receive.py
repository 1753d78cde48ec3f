"""The receiving half of a sync: bucket after bucket, its checksum compared, its weights loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.progress import note_progress
from rlhf_core.weight_sync.checksum import compare_checksum
from rlhf_core.weight_sync.manifest import Bucket, WeightManifest
from rlhf_core.weight_sync.source import LoadWeights
from rlhf_core.weight_sync.transports.transport import Receiver


def receive_weights(
    manifest: WeightManifest,
    receiver: Receiver,
    load: LoadWeights,
    *,
    base: Callable[[str], Tensor] | None = None,
) -> None:
    """Receive every bucket and pass its (name, tensor) pairs to `load`.

    The tensors lie in memory that is used again: `load` must copy what it keeps.

    Args:
        manifest: what the sender sends.
        receiver: an end that has joined the sender's link.
        load: takes the weights of a bucket.
        base: the value that a weight has now; needed where only single values of it travel.

    Raises:
        WeightSyncError: the sender is gone, or what came is not what the manifest says.
        DeadlineExceeded: nothing came in time.
    """
    buckets = manifest.buckets()
    with contextlib.closing(receiver.receive(buckets)) as stream:  # type: ignore[type-var]
        for bucket, flat in _pairs(buckets, stream):
            if bucket.checksum:
                compare_checksum(manifest, bucket, flat)
            load(bucket.views(flat))
            load(_updated(bucket, flat, base))
            note_progress("bytes", bucket.nbytes)


def _pairs(buckets: Sequence[Bucket], stream: Iterable[Tensor]) -> Iterable[tuple[Bucket, Tensor]]:
    # Not zip: the stream must be run to its end, where the receiver acknowledges.
    for index, flat in enumerate(stream):
        yield buckets[index], flat


def _updated(bucket: Bucket, flat: Tensor, base: Callable[[str], Tensor] | None) -> Iterable[tuple[str, Tensor]]:
    """Whole tensors again from those of which single values travelled."""
    for spec, indices, values in bucket.sparse_views(flat):
        if base is None:
            raise WeightSyncError(f"this receiver takes whole tensors, but only changes of {spec.name!r} came")
        whole = base(spec.name).detach().to(spec.torch_dtype, copy=True).contiguous()
        if tuple(whole.shape) != spec.shape:
            raise WeightSyncError(f"weight {spec.name!r} has shape {tuple(whole.shape)} here, {spec.shape} came")
        whole.view(-1)[indices.long().to(whole.device)] = values.to(whole.device)
        yield spec.name, whole
