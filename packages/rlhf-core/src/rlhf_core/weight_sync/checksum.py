"""A checksum of tensors, and the one at a bucket's end that a sender writes and receivers compare.

The checksum is computed where the tensor is, on CPU or GPU, at the speed of memory.
The bytes are read as a matrix of 64-bit words. Its column sums and its row sums are each multiplied with fixed odd
pseudo-random weights and added up modulo 2^64. Every change of a single word changes both sums (odd weights are
invertible); an exchange of words changes at least one of them. It guards against damage, not against malice.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.weight_sync.manifest import CHECKSUM_BYTES, INDEX_BYTES, Bucket, WeightManifest

_COLUMNS = 1 << 12


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Two 64-bit sums over the bytes of a contiguous tensor."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    words = flat.numel() // 8
    head, tail = flat[: words * 8], flat[words * 8 :]
    if head.numel() and head.storage_offset() % 8:
        head = head.clone()
    first, second = _sums(head.view(torch.int64))
    if tail.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        last[: tail.numel()] = tail
        word = int(last.view(torch.int64))
        first, second = first + 3 * word + tail.numel(), second + 5 * word
    return _signed(first), _signed(second)


def write_checksum(manifest: WeightManifest, bucket: Bucket, flat: Tensor) -> None:
    """Write the checksum behind the payload; the gaps between tensors are part of it, so they are zeroed."""
    _zero_gaps(bucket, flat)
    sums = torch.tensor([*checksum(flat[: bucket.payload_bytes]), manifest.version, bucket.index])
    flat[-CHECKSUM_BYTES:].copy_(sums.view(torch.uint8))


def compare_checksum(manifest: WeightManifest, bucket: Bucket, flat: Tensor) -> None:
    """Compare the checksum at the end of a bucket with that of the bytes which came.

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


def _sums(words: Tensor) -> tuple[int, int]:
    rows = words.numel() // _COLUMNS
    body, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    columns = body.sum(0)
    columns[: rest.numel()] += rest
    down = (columns * _weights(_COLUMNS, 1, words.device)).sum()
    across = (body.sum(1) * _weights(rows, 2, words.device)).sum()
    return int(down), int(across + rest.sum() * 7)


@functools.lru_cache(maxsize=64)
def _weights(count: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64) | 1
    return weights.to(device)


def _signed(value: int) -> int:
    """Modulo 2^64, in the range of int64."""
    return (value + 2**63) % 2**64 - 2**63


def _zero_gaps(bucket: Bucket, flat: Tensor) -> None:
    if bucket.part is not None:
        return  # the gap of a sparse tensor is part of what travels
    for spec, offset, after in zip(
        bucket.tensors, bucket.offsets, (*bucket.offsets[1:], bucket.payload_bytes), strict=True
    ):
        if spec.changed is not None:
            flat[offset + spec.changed * INDEX_BYTES : offset + spec.values_offset].zero_()
        flat[offset + spec.nbytes : after].zero_()
