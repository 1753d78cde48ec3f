"""Sequences of numbers in one array, which must be as good as tuples."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import PackedDoubles, PackedFlags, PackedFloats, PackedInts

KINDS = {
    PackedInts: st.integers(-(2**31), 2**31 - 1),
    PackedFloats: st.floats(width=32, allow_nan=False),
    PackedDoubles: st.floats(allow_nan=False),
    PackedFlags: st.booleans(),
}
cases = st.sampled_from(list(KINDS)).flatmap(
    lambda kind: st.tuples(st.just(kind), st.lists(KINDS[kind]), st.lists(KINDS[kind]))
)
places = st.none() | st.integers(-9, 9)


@given(cases, places, places, st.sampled_from([None, 1, 2, -1, -2]))
def test_it_does_what_a_tuple_does(case, start, stop, step):
    kind, first, second = case
    one, other, part = kind(first), tuple(second), slice(start, stop, step)
    assert one == tuple(first)
    assert one == first
    assert tuple(one) == tuple(first)
    assert len(one) == len(first)
    assert hash(one) == hash(tuple(first))
    assert bool(one) is bool(first)
    assert one[part] == first[part]
    assert type(one[part]) is kind
    assert one + other == tuple(first) + other
    assert type(one + other) is kind
    assert other + one == other + tuple(first)
    assert type(other + one) is kind
    assert one + kind(second) == tuple(first) + other
    assert one * 2 == tuple(first) * 2
    assert 0 * one == ()
    assert (one == other) is (tuple(first) == other)
    for value in first:
        assert value in one
        assert one.index(value) == first.index(value)
        assert one.count(value) == first.count(value)
    assert pickle.loads(pickle.dumps(one[part])) == one[part]
    assert pickle.loads(pickle.dumps(one, protocol=2)) == one


def test_its_items_are_numbers_of_python():
    assert [type(item) for item in PackedInts([3])] == [int]
    assert type(PackedInts([3])[0]) is int
    assert type(PackedFloats([3])[0]) is float
    assert PackedFlags([1, 0]).tolist() == [True, False]


@pytest.mark.parametrize(
    "operate",
    [
        lambda packed, array: packed + array,
        lambda packed, array: array + packed,
        lambda packed, array: array * packed,
        lambda packed, array: np.add(packed, 1),
        lambda packed, array: packed + 1,
        lambda packed, array: packed + PackedFloats([1.0]),
        lambda packed, array: packed * 1.5,
    ],
)
def test_nothing_is_done_by_element(operate):
    with pytest.raises(TypeError):
        operate(PackedInts([1, 2, 3]), np.array([1, 2, 3]))


@pytest.mark.parametrize(
    ("kind", "values", "error", "said"),
    [
        (PackedInts, [1.5], TypeError, "int32 numbers, got float64 such as 1.5"),
        (PackedInts, ["a"], TypeError, "such as 'a'"),
        (PackedInts, [1, 2**31], ValueError, "got 2147483648"),
        (PackedInts, np.array([-(2**40)]), ValueError, "got -1099511627776"),
        (PackedInts, [[1, 2]], ValueError, "an array of shape"),
        (PackedFloats, [0.5, None], TypeError, "such as 0.5"),
        (PackedFlags, [0, 2], ValueError, "got 2"),
    ],
)
def test_a_number_that_does_not_fit_is_refused(kind, values, error, said):
    with pytest.raises(error, match=said):
        kind(values)


def test_floats_are_rounded_to_their_precision():
    assert PackedFloats([0.1])[0] == pytest.approx(0.1, abs=1e-8)
    assert PackedFloats([0.1]) != (0.1,)
    assert PackedDoubles([0.1]) == (0.1,)


def test_any_array_or_tensor_will_do():
    assert (
        PackedInts(torch.tensor([4, 5])) == PackedInts(np.array([4, 5], dtype=np.uint8)) == PackedInts(range(4, 6))
    )
    assert PackedFloats(torch.tensor([0.5], dtype=torch.bfloat16)) == (0.5,)
    assert PackedFloats(torch.tensor([0.5], requires_grad=True)) == (0.5,)
    assert PackedInts(PackedFlags([True])) == (1,)
    assert PackedInts(()) == PackedInts(np.array([])) == ()


def test_it_cannot_be_changed():
    given = np.array([1, 2], dtype=np.int32)
    packed = PackedInts(given)
    given[0] = 9
    assert packed == (1, 2)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(packed)[0] = 9
    assert copy.deepcopy(packed) is packed is copy.copy(packed) is PackedInts.of(packed)


def test_memory_that_another_wrote_is_read_where_it_is():
    buffers = []
    sent = pickle.dumps(PackedInts([1, 2, 3])[1:], protocol=5, buffer_callback=buffers.append)
    memory = buffers[0].raw().tobytes()
    assert len(memory) == 8
    found = pickle.loads(sent, buffers=[memory])
    assert found == (2, 3)
    assert np.shares_memory(np.asarray(found), np.frombuffer(memory, dtype=np.int32))
    assert np.shares_memory(np.asarray(PackedInts(np.frombuffer(memory, dtype=np.int32))), np.asarray(found))


def test_parts_are_joined():
    assert PackedFloats.joined([PackedFloats([1.0]), [2.0], np.array([3.0])]) == (1.0, 2.0, 3.0)
    assert PackedFloats.joined([]) == ()
    assert PackedInts.full(2, -1) == (-1, -1)


def test_a_long_one_is_shown_in_part():
    assert repr(PackedFlags([True, False])) == "PackedFlags([True, False])"
    assert repr(PackedInts(range(1000))).endswith(" 63, ... 1000 in all])")


def test_torch_reads_it_as_a_list():
    assert torch.tensor(PackedInts([1, 2])).dtype == torch.long
    assert torch.equal(torch.tensor(PackedFloats([0.5])), torch.tensor([0.5]))
