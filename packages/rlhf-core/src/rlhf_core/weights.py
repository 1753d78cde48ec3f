"""The weight-sync protocol: a manifest that both sides cut into the same buckets, then one flat buffer each.

    sender (all training ranks)                       receiver (each rollout worker)
    manifest = source.manifest(version) ───────────►  same manifest, so the same buckets
    for bucket: gather, pack into a flat buffer ───►  receive the buffer, hand out views, load them
    close                                             commit(version)

Names are checkpoint names. Every name travels exactly once; nothing is left over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlhf_core.checksum import checksum
from rlhf_core.errors import WeightSyncError
from rlhf_core.manifest import CHECKSUM_BYTES, DEFAULT_BUCKET_BYTES, Bucket, TensorSpec, WeightManifest
from rlhf_core.transport import Receiver, Sender, Sending

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Bucket",
    "ModuleWeights",
    "TensorSpec",
    "WeightManifest",
    "WeightSource",
    "check_base",
    "check_coverage",
    "copy_into",
    "receive_weights",
    "send_weights",
]

Load = Callable[[Iterable[tuple[str, Tensor]]], None]


class WeightSource(Protocol):
    """The weights of a training engine. All ranks of the engine take part in every call."""

    def manifest(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """Names, full shapes and the dtypes they will be sent in."""
        ...

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """The bucket's tensors at full shape on the engine's device.

        They keep their values for as long as the caller holds them, through later calls too: the sender may
        send them from where they are. Sparse tensors (see TensorSpec) are bytes: the indices, then the values
        at `values_offset`. On ranks that do not send, the gather still takes part in the collective and may
        yield nothing.
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

    Two buffers alternate, so that the next bucket is gathered and packed while the last one is on its way; with
    what the source gathers at a time they are all the memory it takes. A bucket that is one tensor in the right
    form already is sent from where it is.

    Raises:
        WeightSyncError: the source does not keep to its manifest, or a receiver is gone.
        DeadlineExceeded: receivers did not take the weights in time.
    """
    buckets = manifest.buckets()
    if sender is None:
        for bucket in buckets:
            for _ in source.gather(bucket):
                pass
        return
    # Large tensors that travel alone are mostly sent in place and need no buffer.
    shared = [bucket.nbytes for bucket in buckets if len(bucket.tensors) > 1]
    pending: list[Sending | None] = [None, None]
    for index, bucket in enumerate(buckets):
        slot = index % 2
        if (sending := pending[slot]) is not None:
            sending.wait()
        tensors, flat = source.gather(bucket), None
        if len(bucket.tensors) == 1:
            tensors = list(tensors)
            flat = _in_place(bucket, tensors, sender.device)
        if flat is None:
            flat = sender.buffers(max([bucket.nbytes, *shared]))[slot][: bucket.nbytes]
            _pack(bucket, tensors, flat)
            if bucket.checksum:
                _seal(manifest, bucket, flat)
        del tensors
        pending[slot] = sender.send(flat, bucket)
    # Oldest first: the receiver takes them in the order of sending.
    for index in (len(buckets), len(buckets) + 1):
        if (sending := pending[index % 2]) is not None:
            sending.wait()
    sender.finish()


def _in_place(bucket: Bucket, tensors: Sequence[tuple[str, Tensor]], device: torch.device) -> Tensor | None:
    """The bytes of the bucket's only tensor, if they can be sent as they are."""
    if bucket.checksum or len(tensors) != 1:
        return None
    ((name, tensor),) = tensors
    (spec,) = bucket.tensors
    as_is = (
        name == spec.name
        and spec.changed is None
        and tensor.dtype == spec.torch_dtype
        and tuple(tensor.shape) == spec.shape
        and tensor.device.type == device.type
        and tensor.is_contiguous()
        and spec.nbytes == bucket.nbytes
    )
    return tensor.detach().reshape(-1).view(torch.uint8) if as_is else None


def _pack(bucket: Bucket, tensors: Iterable[tuple[str, Tensor]], flat: Tensor) -> None:
    """Copy the tensors into the buffer, casting to the manifest's dtypes; every name exactly once."""
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


def _seal(manifest: WeightManifest, bucket: Bucket, flat: Tensor) -> None:
    """Write the checksum behind the payload; the gaps between tensors are part of it, so they are zeroed."""
    _zero_gaps(bucket, flat)
    sums = torch.tensor([*checksum(flat[: bucket.payload_bytes]), manifest.version, bucket.index])
    flat[-CHECKSUM_BYTES:].copy_(sums.view(torch.uint8))


def _zero_gaps(bucket: Bucket, flat: Tensor) -> None:
    for spec, offset, after in zip(
        bucket.tensors, bucket.offsets, (*bucket.offsets[1:], bucket.payload_bytes), strict=True
    ):
        if spec.changed is not None:
            flat[offset + spec.changed * 4 : offset + spec.values_offset].zero_()
        flat[offset + spec.nbytes : after].zero_()


def _check_seal(manifest: WeightManifest, bucket: Bucket, flat: Tensor) -> None:
    # The gaps do not travel by every transport. What is in them here is this side's own memory.
    _zero_gaps(bucket, flat)
    first, second, version, index = flat[-CHECKSUM_BYTES:].cpu().clone().view(torch.int64).tolist()
    if (version, index) != (manifest.version, bucket.index):
        raise WeightSyncError(
            f"bucket {bucket.index} of weight version {manifest.version} was expected, but bucket {index} of "
            f"version {version} came"
        )
    if checksum(flat[: bucket.payload_bytes]) != (first, second):
        raise WeightSyncError(
            f"the checksum of bucket {bucket.index} of weight version {manifest.version} "
            f"({bucket.tensors[0].name} ...) is wrong: the weights were damaged on the way"
        )


def receive_weights(
    manifest: WeightManifest,
    receiver: Receiver,
    load: Load,
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
                _check_seal(manifest, bucket, flat)
            load(bucket.views(flat))
            load(_updated(bucket, flat, base))


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


def copy_into(module: torch.nn.Module) -> Load:
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
    """Refuse a manifest that would leave a parameter of `module` as it was; a partial one may do so.

    Raises:
        WeightSyncError: names the parameters that nothing is sent for. Tied ones count as covered by their twin.
    """
    if manifest.partial:
        return
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


def check_base(manifest: WeightManifest, version: int | None) -> None:
    """Refuse changes to weights that a receiver does not hold.

    Args:
        manifest: what is about to come.
        version: what the receiver holds for certain; None after a failed sync.

    Raises:
        WeightSyncError: the manifest is partial and its base is another version; all weights must be sent.
    """
    if manifest.partial and manifest.base_version != version:
        held = "weights that a failed sync left" if version is None else f"version {version}"
        raise WeightSyncError(
            f"changes from weight version {manifest.base_version} to {manifest.version} cannot be applied to "
            f"{held}; send all weights"
        )
