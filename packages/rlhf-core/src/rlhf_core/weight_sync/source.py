"""Where the weights of a sync come from, and the checks of what takes them.

Both sides cut the same manifest into the same buckets, and each bucket travels as one flat buffer:

    sender (all training ranks)                       receiver (each rollout worker)
    manifest = source.manifest(version) ───────────►  same manifest, so the same buckets
    for bucket: gather, pack into a flat buffer ───►  receive the buffer, hand out views, load them
    close                                             commit(version)

Names are checkpoint names. Every name travels exactly once; nothing is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.weight_sync.checkpoint_layout import checkpoint_views
from rlhf_core.weight_sync.manifest import DEFAULT_BUCKET_BYTES, Bucket, TensorSpec, WeightManifest

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], None]


class WeightSource(Protocol):
    """The weights of a training engine. All ranks of the engine take part in every call."""

    def manifest(self, version: int, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
        """Names, full shapes and the dtypes they will be sent in."""
        ...

    def gather(self, bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
        """The bucket's tensors at full shape on the engine's device; the whole tensor for each of its parts.

        They keep their values for as long as the caller holds them, through later calls too: the sender may
        send them from where they are. Sparse tensors (see TensorSpec) are bytes: the indices, then the values
        at `values_offset`. On ranks that do not send, the gather still takes part in the collective and may
        yield nothing.
        """
        ...


@runtime_checkable
class PackingSource(WeightSource, Protocol):
    """A WeightSource that can write a bucket into the sender's buffer itself, which saves the full copies."""

    def packs(self, bucket: Bucket) -> bool:
        """Whether `pack` is to be called in place of `gather`; all ranks give the same answer."""
        ...

    def pack(self, bucket: Bucket, flat: Tensor | None) -> None:
        """Write all tensors to their places in the buffer (`Bucket.views`), or the bytes of `Bucket.part` to its
        beginning; None on ranks that do not send."""
        ...


@runtime_checkable
class GatheringSource(WeightSource, Protocol):
    """A WeightSource that brings together what lies on several ranks, and counts it.

    Buckets of one sync come in order. What is made of one parameter and goes in several buckets is gathered with
    the first of them, and kept until the last.
    """

    def end_sync(self) -> int:
        """Drop what is kept; returns the bytes of parameters gathered since the last call, again for each time."""
        ...


class ModuleWeights:
    """WeightSource of a module that lives unsharded in this process.

    Weights that Transformers keeps in another layout than their checkpoint travel in the checkpoint's. `names` maps
    a weight's name there to the one it travels under, or to None to leave it out.
    """

    def __init__(self, module: torch.nn.Module, names: Callable[[str], str | None] = lambda name: name) -> None:
        self._tensors = {
            mapped: tensor
            for name, tensor in checkpoint_views(module).items()
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


def copy_into(module: torch.nn.Module) -> LoadWeights:
    """A `load` that copies weights into a module with checkpoint names.

    Raises:
        WeightSyncError: a name the module does not have, or another shape.
    """
    targets: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False)) | checkpoint_views(module)

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
        WeightSyncError: names the weights that nothing is sent for. Tied ones count as covered by their twin.
    """
    if manifest.partial:
        return
    sent = {spec.name for spec in manifest.tensors}
    twins: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        twins.setdefault(id(parameter), set()).add(name)
    missing = sorted(
        name for name, tensor in checkpoint_views(module).items() if not twins.get(id(tensor), {name}) & sent
    )
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
        WeightSyncError: the manifest is partial and its base is another version; all weights must be sent. Or it is
            one of an adapter: backends that have the capability `adapters` check those by themselves.
    """
    if manifest.adapter is not None:
        raise WeightSyncError(
            f"weight version {manifest.version} is an adapter, and this receiver takes weights; send them merged"
        )
    if manifest.partial and manifest.base_version != version:
        held = "weights that a failed sync left" if version is None else f"version {version}"
        raise WeightSyncError(
            f"changes from weight version {manifest.base_version} to {manifest.version} cannot be applied to "
            f"{held}; send all weights"
        )
