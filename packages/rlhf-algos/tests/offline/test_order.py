from __future__ import annotations

from collections import Counter

from rlhf_algos.offline.order import batch_indices, epoch_order, steps_per_epoch


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
