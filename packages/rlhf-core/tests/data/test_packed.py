"""Sequences of numbers in one array, which must be as good as tuples."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlhf_core import PackedDoubles, PackedFlags, PackedFloats, PackedInts, Run, Sample
from rlhf_core.data import packed

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


@pytest.fixture
def every_part_is_kept(monkeypatch):
    monkeypatch.setattr(packed, "_WORTH_A_PART", 0)


@given(cases, places, places, st.sampled_from([None, 1, 2, -1, -2]))
def test_it_does_what_a_tuple_does(case, start, stop, step):
    kind, first, second = case
    does_what_a_tuple_does(kind(first), first, second, slice(start, stop, step))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases, st.integers(0, 9), places, places, st.sampled_from([None, 1, 2, -1, -2]))
def test_parts_and_runs_are_no_different(every_part_is_kept, case, cut, start, stop, step):
    kind, first, second = case
    first = [value for value in first for _ in range(1 + cut % 3)]
    one = kind.joined([kind(first[:cut]), kind(first[cut:]).compressed()])
    does_what_a_tuple_does(one, first, second, slice(start, stop, step))


def does_what_a_tuple_does(one, first, second, part):
    kind, other = type(one), tuple(second)
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
    numbers = PackedInts(given)
    given[0] = 9
    assert numbers == (1, 2)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(numbers)[0] = 9
    assert copy.deepcopy(numbers) is numbers is copy.copy(numbers) is PackedInts.of(numbers)


def test_memory_that_another_wrote_is_read_where_it_is():
    buffers = []
    sent = pickle.dumps(PackedInts([1, 2, 3])[1:], protocol=5, buffer_callback=buffers.append)
    memory = buffers[0].raw().tobytes()
    assert len(memory) == 8
    found = pickle.loads(sent, buffers=[memory])
    assert found == (2, 3)
    assert np.shares_memory(np.asarray(found), np.frombuffer(memory, dtype=np.int32))
    assert np.shares_memory(np.asarray(PackedInts(np.frombuffer(memory, dtype=np.int32))), np.asarray(found))


def test_memory_of_another_is_copied_on_request():
    read = PackedInts(np.frombuffer(np.arange(100, dtype=np.int32).tobytes(), dtype=np.int32))
    row = read + PackedInts(range(100))
    assert row.owned() == row
    assert not np.shares_memory(row.owned().parts[0], row.parts[0])
    assert row.owned().parts[1] is row.parts[1]
    assert not row.owned().parts[0].flags.writeable
    own = PackedInts(range(10))
    assert own.owned() is own
    assert PackedInts.full(100, 1).owned().parts == (Run(1, 100),)


def test_parts_are_joined():
    assert PackedFloats.joined([PackedFloats([1.0]), [2.0], np.array([3.0])]) == (1.0, 2.0, 3.0)
    assert PackedFloats.joined([]) == ()
    assert PackedInts.full(2, -1) == (-1, -1)


def test_long_parts_are_not_copied():
    prompt, response = PackedInts(range(100)), PackedInts(range(500))
    row = prompt + response
    assert row[100:] == response
    assert np.shares_memory(row.parts[0], np.asarray(prompt))
    assert np.shares_memory(row.parts[1], np.asarray(response))
    assert len((row + (7,) * 3).parts) == 3
    assert len(PackedInts.joined([prompt[:90], [7]]).parts) == 1  # not worth it
    buffers = []
    sent = pickle.dumps((row, prompt), protocol=5, buffer_callback=buffers.append)
    assert [len(buffer.raw()) for buffer in buffers] == [400, 2000, 400]
    found, _ = pickle.loads(sent, buffers=[buffer.raw().tobytes() for buffer in buffers])
    assert found == row
    assert found.parts[1].flags.writeable is False


def test_what_repeats_is_kept_as_runs():
    mask = PackedFlags([False] * 300 + [True] * 500).compressed()
    assert mask.parts == (Run(False, 300), Run(True, 500))
    assert mask[200:400].parts == (Run(False, 100), Run(True, 100))
    assert (mask.index(True), mask.count(True), mask[-1], mask[299]) == (300, 500, True, False)
    assert len(pickle.dumps(mask, protocol=5)) < 200
    assert PackedInts(range(1000)).compressed().parts[0][5] == 5
    signs = PackedFloats([0.0] * 200 + [-0.0] * 200).compressed()
    assert [math.copysign(1, part.value) for part in signs.parts] == [1, -1]
    assert PackedInts.full(300, -1).parts == (Run(-1, 300),)


def test_a_long_one_is_shown_in_part():
    assert repr(PackedFlags([True, False])) == "PackedFlags([True, False])"
    assert repr(PackedInts(range(1000))).endswith(" 63, ... 1000 in all])")


def test_torch_reads_it_as_a_list():
    assert torch.tensor(PackedInts([1, 2])).dtype == torch.long
    assert torch.equal(torch.tensor(PackedFloats([0.5])), torch.tensor([0.5]))


def test_a_sample_comes_back_as_it_was():
    sample = Sample(
        token_ids=(7, 8, 2), log_probs=(-0.5, -0.25, 0.0), weight_versions=(3, 3, 4), finish_reason="stop"
    )
    for protocol in (2, 5):
        assert pickle.loads(pickle.dumps(sample, protocol=protocol)) == sample
    assert sample.owned() == sample


def test_runs_are_joined_with_arrays():
    assert PackedInts.joined((Run(-1, 2), PackedInts([5, 6]), [7], Run(3, 1))) == (-1, -1, 5, 6, 7, 3)
