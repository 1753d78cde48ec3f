import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import Batch, deal, deal_units, order_in_groups, pad_rows
from rlhf_core.training.dealing import SharingItem, deal_sharing


def loads(costs, dealt):
    return [sum(costs[item] for item in items) for items in dealt]


def test_by_hand():
    assert deal([9, 1, 5, 5], 2) == [[0, 1], [2, 3]]
    assert deal([100, 100, 1, 1], 2, even=True) == [[0, 2], [1, 3]]
    assert deal([7], 2) == [[0], []]
    assert deal([], 3) == [[], [], []]


@given(costs=st.lists(st.integers(1, 500), max_size=60), ranks=st.integers(1, 5), even=st.booleans())
def test_every_item_goes_to_one_rank(costs, ranks, even):
    costs += [1] * (ranks if even else 0)
    dealt = deal(costs, ranks, even=even)
    assert len(dealt) == ranks
    assert sorted(item for items in dealt for item in items) == list(range(len(costs)))
    assert all(items == sorted(items) for items in dealt)


@given(costs=st.lists(st.integers(1, 500), max_size=60), ranks=st.integers(1, 5))
def test_founddiffer_by_one_item_at_most(costs, ranks):
    found = loads(costs, deal(costs, ranks))
    assert max(found) - min(found) <= max(costs, default=0)


@given(costs=st.lists(st.integers(1, 500), min_size=1, max_size=60), ranks=st.integers(1, 5))
def test_an_even_deal_leaves_no_rank_without_work(costs, ranks):
    costs *= ranks
    sizes = [len(items) for items in deal(costs, ranks, even=True)]
    assert min(sizes) >= 1
    assert max(sizes) <= -(-len(costs) // ranks)


def test_an_even_deal_of_too_little_is_refused():
    with pytest.raises(ValueError, match="2 items cannot be dealt to 3 ranks"):
        deal([4, 4], 3, even=True)


def sharing_items(groups, samples, seed=0):
    """Groups of a prompt of 100 to 500 tokens, with answers of unequal length."""
    rng = random.Random(seed)
    items = []
    for group in range(groups):
        shared = rng.randint(100, 500)
        own = (min(1024, int(rng.lognormvariate(5.3, 0.7))) for _ in range(samples))
        items += [SharingItem(shares=group, shared=shared, own=tokens) for tokens in own]
    return items


def tokens_run(items, rows):
    """Tokens of a rank that runs what its rows share once."""
    shared = {items[row].shares: items[row].shared for row in rows}
    return sum(shared.values()) + sum(items[row].own for row in rows)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_prompts_are_run_about_once_whatever_the_number_of_ranks(ranks):
    items = sharing_items(groups=128, samples=8)
    dealt = deal_sharing(items, ranks)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(items)))
    found = [tokens_run(items, rows) for rows in dealt]
    assert sum(found) <= 1.1 * tokens_run(items, range(len(items)))
    assert max(found) <= 1.1 * sum(found) / ranks


def test_one_large_group_is_split_over_ranks():
    items = [SharingItem(shares="only", shared=10, own=100)] * 8
    assert sorted(map(len, deal_sharing(items, 4))) == [2, 2, 2, 2]


def test_a_group_stays_together_where_splitting_it_would_cost_more():
    items = [SharingItem(shares=name, shared=1000, own=1) for name in "aaaabb"]
    assert deal_sharing(items, 2) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_is_without_an_item_and_none_is_lost(seed):
    rng = random.Random(seed)
    ranks = rng.randint(1, 9)
    items = [
        SharingItem(shares=rng.randint(0, 3), shared=rng.randint(0, 50), own=rng.randint(0, 50))
        for _ in range(ranks + rng.randint(0, 12))
    ]
    dealt = deal_sharing(items, ranks)
    assert all(dealt)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(items)))


def test_too_few_items_are_refused():
    with pytest.raises(ValueError, match="1 items cannot be dealt to 2 ranks"):
        deal_sharing([SharingItem(shares=0, shared=1, own=1)], 2)


def test_units_of_a_batch_with_one_prompt_go_to_one_rank():
    prompts, answers = [[5, 6, 7], [8, 9, 10]], [[11], [12], [13, 14]]
    rows = [prompt + answer for answer in answers for prompt in prompts]
    mask = [[False] * 3 + [True] * len(answer) for answer in answers for _ in prompts]
    batch = Batch(
        token_ids=pad_rows(rows, value=0, dtype=torch.long),
        attention_mask=pad_rows([[True] * len(row) for row in rows], value=False, dtype=torch.bool),
        response_mask=pad_rows(mask, value=False, dtype=torch.bool),
    )
    assert deal_units(batch, 2) == [[0, 2, 4], [1, 3, 5]]
    assert sorted(map(len, deal_units(batch, 6))) == [1] * 6


def test_portions_hold_whole_groups_in_the_order_that_is_drawn():
    groups = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    order = [9, 4, 0, 7, *(row for row in range(12) if row not in (9, 4, 0, 7))]
    assert order_in_groups(groups, 2, order) == [[9, 10, 11, 0, 1, 2], [3, 4, 5, 6, 7, 8]]
    parts = order_in_groups([0, 0, 0, 1], 3, [3, 1, 0, 2])  # fewer groups than portions
    assert parts == [[3, 2], [1], [0]]
    assert sorted(row for part in parts for row in part) == [0, 1, 2, 3]


def test_portions_have_about_as_many_rows():
    rng = random.Random(3)
    groups = [group for group in range(40) for _ in range(rng.randint(1, 8))]
    order = list(range(len(groups)))
    rng.shuffle(order)
    sizes = [len(part) for part in order_in_groups(groups, 4, order)]
    assert max(sizes) - min(sizes) <= 8
