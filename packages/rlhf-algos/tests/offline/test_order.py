from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from rlhf_algos.offline.order import batch_indices, epoch_order, split_by_length, steps_per_epoch


def test_one_dataset_is_permuted_anew_every_epoch():
    first, second = (epoch_order([50], [1.0], seed=3, epoch=epoch) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == epoch_order([50], [1.0], seed=3, epoch=0)
    assert first != epoch_order([50], [1.0], seed=4, epoch=0)


def test_weights_are_the_shares_of_the_draws():
    order = epoch_order([1000, 1000], [3.0, 1.0], seed=0, epoch=0)
    share = sum(index < 1000 for index in order) / len(order)
    assert 0.70 < share < 0.80
    counts = Counter(order)
    assert max(counts[i] for i in range(1000)) <= 2  # a dataset repeats only once it is used up
    assert max(counts[i] for i in range(1000, 2000)) == 1


def test_batches_cut_the_epoch():
    order = list(range(10))
    assert steps_per_epoch(10, 4) == 3
    batches = [batch_indices(order, step=step, batch_size=4) for step in range(3)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 5))
def test_every_item_goes_to_one_rank_and_loads_are_close(lengths, parts):
    dealt = split_by_length(lengths, parts)
    assert sorted(index for items in dealt for index in items) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in items) for items in dealt]
    assert max(loads) - min(loads) <= max(lengths, default=0)
