"""A checksum of tensors that is computed where they are, on CPU or GPU, at the speed of memory.

The bytes are read as a matrix of 64-bit words. Its column sums and its row sums are each multiplied with fixed odd
pseudo-random weights and added up modulo 2^64. Every change of a single word changes both sums (odd weights are
invertible); an exchange of words changes at least one of them. It guards against damage, not against malice.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

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
