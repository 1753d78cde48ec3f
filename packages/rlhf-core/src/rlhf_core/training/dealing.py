"""Rows dealt out to ranks, so that all have about as many tokens to run and run a shared prompt once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.data.batch import RUN_TOGETHER, Batch
from rlhf_core.data.ragged import RaggedBatch
from rlhf_core.training.micro_batches import prompts_of, units_together

_CLOSE = 1.05
"""Ranks whose costs differ by no more than this factor from the mean are not balanced any further."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingItem:
    """Something to run of which a part is run once with others that have it too."""

    shares: Hashable
    """Items with an equal one share `shared` tokens."""
    shared: int
    own: int
    """Tokens that are the item's alone."""


def deal_sharing(items: Sequence[SharingItem], ranks: int) -> list[list[int]]:
    """Items dealt to ranks so that costs are close and what items share is run on few ranks.

    Items that share something start on one rank, the costliest groups first, each on the cheapest rank. Then, while
    the costliest rank is well above the mean, the part of a group that helps most moves from there to the cheapest
    one, which runs the shared tokens once more. No rank is without an item.

    Returns:
        The indices of each rank's items, in ascending order.

    Raises:
        ValueError: there are fewer items than ranks.

    >>> pair = [SharingItem(shares=name, shared=6, own=2) for name in "aabb"]
    >>> deal_sharing(pair, 2)
    [[0, 1], [2, 3]]
    >>> deal_sharing(pair, 3)
    [[0], [2, 3], [1]]
    """
    if len(items) < ranks:
        raise ValueError(f"{len(items)} items cannot be dealt to {ranks} ranks; give at least one for each")
    hands = _Hands(items, ranks)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        groups[item.shares].append(index)
    for members in sorted(groups.values(), key=lambda members: -hands.cost_of(members)):
        hands.give(min(range(ranks), key=hands.load.__getitem__), members)
    hands.leave_none_empty()
    hands.balance()
    return [sorted(index for members in hand.values() for index in members) for hand in hands.hands]


class _Hands:
    """What each rank has so far."""

    def __init__(self, items: Sequence[SharingItem], ranks: int) -> None:
        self._items = items
        self.hands: list[dict[Hashable, list[int]]] = [{} for _ in range(ranks)]
        self.load = [0] * ranks

    def cost_of(self, members: Iterable[int]) -> int:
        """Tokens of items of one group, run together."""
        members = list(members)
        return self._items[members[0]].shared + sum(self._items[index].own for index in members) if members else 0

    def give(self, rank: int, members: Sequence[int]) -> None:
        hand, shares = self.hands[rank], self._items[members[0]].shares
        before = self.cost_of(hand.get(shares, ()))
        # The costliest first: those at the end are the ones to move.
        hand[shares] = sorted([*hand.get(shares, ()), *members], key=lambda index: -self._items[index].own)
        self.load[rank] += self.cost_of(hand[shares]) - before

    def take(self, rank: int, shares: Hashable, count: int) -> list[int]:
        """The cheapest `count` items of a rank's group."""
        hand = self.hands[rank]
        before = self.cost_of(hand[shares])
        kept, taken = hand[shares][:-count], hand[shares][-count:]
        if kept:
            hand[shares] = kept
        else:
            del hand[shares]
        self.load[rank] += self.cost_of(kept) - before
        return taken

    def leave_none_empty(self) -> None:
        """Give every rank without an item some of the costliest rank that has several."""
        for rank in (rank for rank, hand in enumerate(self.hands) if not hand):
            several = [other for other, hand in enumerate(self.hands) if sum(map(len, hand.values())) > 1]
            source = max(several, key=self.load.__getitem__)
            hand = self.hands[source]
            if len(hand) > 1:
                cheapest = min(hand, key=lambda shares: self.cost_of(hand[shares]))
                self.give(rank, self.take(source, cheapest, len(hand[cheapest])))
            else:
                ((shares, members),) = hand.items()
                self.give(rank, self.take(source, shares, len(members) // 2))

    def balance(self) -> None:
        """Move parts of groups from the costliest rank to the cheapest one, while that makes it cheaper."""
        close = _CLOSE * sum(self.load) / len(self.load)
        for _ in range(4 * len(self.hands)):
            source = max(range(len(self.load)), key=self.load.__getitem__)
            target = min(range(len(self.load)), key=self.load.__getitem__)
            if self.load[source] <= close:
                return
            moves = self._moves(source, target)
            if not moves or (best := min(moves))[0] >= self.load[source]:
                return
            _, shares, count = best
            self.give(target, self.take(source, list(self.hands[source])[shares], count))

    def _moves(self, source: int, target: int) -> list[tuple[int, int, int]]:
        """(cost of the costlier rank afterwards, which group, how many of its items) of all moves."""
        hand, other = self.hands[source], self.hands[target]
        moves = []
        for place, (shares, members) in enumerate(hand.items()):
            there, moved = self.cost_of(other.get(shares, ())), 0
            for count in range(1, len(members) + 1):
                if count == len(members) and len(hand) == 1:
                    break  # the rank would be left without an item
                moved += self._items[members[-count]].own
                shared = self._items[members[0]].shared
                left = self.load[source] - moved - (shared if count == len(members) else 0)
                grown = self.load[target] + moved + (0 if there else shared)
                moves.append((max(left, grown), place, count))
        return moves


def deal_units(batch: Batch | RaggedBatch, ranks: int) -> list[list[int]]:
    """Units of a batch dealt to ranks: tokens in balance, units with the same prompt together.

    Units that must run together (the column `RUN_TOGETHER`) are never split.

    Raises:
        ValueError: there are fewer units, or units that run together, than ranks.
    """
    lengths = batch.unit_lengths
    if RUN_TOGETHER in batch:
        parts = units_together(batch)
        dealt = deal([sum(lengths[unit] for unit in part) for part in parts], ranks, even=True)
        return [[unit for part in items for unit in parts[part]] for items in dealt]
    size = batch.rows_per_unit
    prompts = prompts_of(batch)
    items = [
        SharingItem(shares=prompts[unit * size].tokens, shared=prompts[unit * size].length, own=own)
        for unit, own in enumerate(_own_tokens(lengths, [prompt.length for prompt in prompts], size))
    ]
    return deal_sharing(items, ranks)


def _own_tokens(lengths: Sequence[int], prompts: Sequence[int], size: int) -> list[int]:
    """Tokens of each unit beside the prompt of its first row, which its other rows may share."""
    return [length - sum(prompts[unit * size : (unit + 1) * size]) for unit, length in enumerate(lengths)]


def order_in_groups(groups: Sequence[int], parts: int, order: Sequence[int]) -> list[list[int]]:
    """Rows in `parts` portions of about as many rows, rows of one group in one portion.

    Args:
        groups: the group of each row.
        parts: how many portions; with fewer groups than portions, rows go where there is room.
        order: all rows, in the order in which they, or the groups of theirs that come first, are placed.

    >>> order_in_groups([0, 0, 1, 1, 2, 2], 3, [3, 5, 0, 1, 2, 4])
    [[2, 3], [4, 5], [0, 1]]
    """
    members: Mapping[int, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    whole = len(members) >= parts
    portions: list[list[int]] = [[] for _ in range(parts)]
    placed: set[int] = set()
    for row in order:
        if row in placed:
            continue
        rows = members[groups[row]] if whole else [row]
        placed.update(rows)
        min(portions, key=len).extend(rows)
    return portions
