"""The checksum at a bucket's end: written by the sender, compared by receivers."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.weight_sync.checksum import checksum
from rlhf_core.weight_sync.manifest import CHECKSUM_BYTES, Bucket, WeightManifest


def write_checksum(manifest: WeightManifest, bucket: Bucket, flat: Tensor) -> None:
    """Write the checksum behind the payload; the gaps between tensors are part of it, so they are zeroed."""
    _zero_gaps(bucket, flat)
    sums = torch.tensor([*checksum(flat[: bucket.payload_bytes]), manifest.version, bucket.index])
    flat[-CHECKSUM_BYTES:].copy_(sums.view(torch.uint8))


def check_seal(manifest: WeightManifest, bucket: Bucket, flat: Tensor) -> None:
    """Compare it.

    Raises:
        WeightSyncError: another bucket or version came, or its bytes were damaged.
    """
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


def _zero_gaps(bucket: Bucket, flat: Tensor) -> None:
    for spec, offset, after in zip(
        bucket.tensors, bucket.offsets, (*bucket.offsets[1:], bucket.payload_bytes), strict=True
    ):
        if spec.changed is not None:
            flat[offset + spec.changed * 4 : offset + spec.values_offset].zero_()
        flat[offset + spec.nbytes : after].zero_()
