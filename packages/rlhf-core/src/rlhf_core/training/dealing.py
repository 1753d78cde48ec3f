"""Rows dealt out to ranks, so that all have about as many tokens to run."""

from __future__ import annotations

from collections.abc import Sequence


def deal(costs: Sequence[int], ranks: int, *, even: bool = False) -> list[list[int]]:
    """Items dealt to ranks so that their summed costs are close: the costliest first, each to the cheapest rank.

    Args:
        costs: of each item, tokens for instance.
        ranks: how many there are.
        even: also give every rank the same number of items, give or take one, so that none is without work.

    Returns:
        The indices of each rank's items, in ascending order.

    Raises:
        ValueError: `even`, and there are fewer items than ranks.

    >>> deal([9, 1, 5, 5], 2)
    [[0, 1], [2, 3]]
    >>> deal([9, 1, 1, 1], 2), deal([9, 1, 1, 1], 2, even=True)
    ([[0], [1, 2, 3]], [[0, 3], [1, 2]])
    """
    if even and len(costs) < ranks:
        raise ValueError(f"{len(costs)} items cannot be dealt to {ranks} ranks; give at least one for each")
    most = -(-len(costs) // ranks) if even else len(costs)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    order = sorted(range(len(costs)), key=lambda item: -costs[item])
    for left, item in zip(range(len(costs), 0, -1), order, strict=True):
        empty = [rank for rank in range(ranks) if not dealt[rank]]
        candidates = [rank for rank in range(ranks) if len(dealt[rank]) < most]
        if even and len(empty) == left:
            candidates = empty
        rank = min(candidates, key=lambda candidate: (load[candidate], len(dealt[candidate])))
        dealt[rank].append(item)
        load[rank] += costs[item]
    return [sorted(items) for items in dealt]
