"""Which examples make up which batch: a pure function of seed and step, so that a resumed run continues exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def epoch_order(sizes: Sequence[int], weights: Sequence[float], *, seed: int, epoch: int) -> list[int]:
    """Indices into the concatenation of datasets of the given sizes, in the order of one epoch.

    An epoch has as many examples as all datasets together. With equal weights per example (the default of one
    dataset) it is a permutation; otherwise each draw picks a dataset with probability proportional to its
    weight and takes that dataset's next example, over a fresh permutation whenever it runs out.

    >>> sorted(epoch_order([2, 3], [2.0, 3.0], seed=0, epoch=0))
    [0, 1, 2, 3, 4]
    """
    random = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    total = sum(sizes)
    per_example = [weight / size for weight, size in zip(weights, sizes, strict=True)]
    if max(per_example) - min(per_example) < 1e-9 * max(per_example):
        return torch.randperm(total, generator=random).tolist()
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    drawn = torch.multinomial(torch.tensor(weights), total, replacement=True, generator=random).tolist()
    queues: list[list[int]] = [[] for _ in sizes]
    order = []
    for dataset in drawn:
        if not queues[dataset]:
            queues[dataset] = torch.randperm(sizes[dataset], generator=random).tolist()
        order.append(starts[dataset] + queues[dataset].pop())
    return order


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Batches of an epoch; the last one may be smaller."""
    return math.ceil(examples / batch_size)


def batch_indices(order: Sequence[int], *, step: int, batch_size: int) -> list[int]:
    """The examples of the step number `step` (from 0) of an epoch."""
    return list(order[step * batch_size : (step + 1) * batch_size])
