import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import deal


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
def test_loads_differ_by_one_item_at_most(costs, ranks):
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
