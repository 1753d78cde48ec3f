"""Values as text: every kind comes back as itself, and nothing else comes out."""

import datetime
import math
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_rollout.rewards.grading.plain_data import NotPlain, decode, encode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)
VALUES = st.recursive(
    SCALARS | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_values_come_back_as_themselves(value):
    back = decode(encode(value))
    assert back == value
    assert type(back) is type(value)


def test_library_values_come_back():
    for value in (
        Decimal("1.50"),
        Fraction(-1, 3),
        range(1, 9, 2),
        deque([1, 2]),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 1, 2, 3),
        datetime.timedelta(days=-1, seconds=5),
    ):
        assert decode(encode(value)) == value
        assert type(decode(encode(value))) is type(value)
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    back = decode(encode(array))
    assert back.dtype == np.int16
    assert np.array_equal(back, array)
    assert decode(encode(np.float64(0.5))) == 0.5
    assert decode(encode(np.array(["a", "bc"]))).tolist() == ["a", "bc"]


def test_types_made_from_plain_ones_are_plain():
    class Always(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    back = decode(encode(Always(3)))
    assert type(back) is int
    assert back != 4
    assert decode(encode(namedtuple("P", "x")(1))) == (1,)
    assert decode(encode(Counter("aab"))) == {"a": 2, "b": 1}
    assert decode(encode(OrderedDict(a=1))) == {"a": 1}
    assert math.isnan(decode(encode(math.nan)))


def test_what_is_not_plain_is_refused():
    cycle = []
    cycle.append(cycle)
    for value in (object(), cycle, lambda: 1, open):
        with pytest.raises(NotPlain):
            encode(value)
    assert encode(object(), lambda value: "5") == "5"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1",
        "1 2",
        "nope",
        "[" * 100_000,
        "9" * 10_000,
        '{"v":1}',
        '{"t":"nope","v":1}',
        '{"t":[],"v":1}',
        '{"t":"reference","v":[1,"mine"]}',
        '{"t":"set","v":[[1]]}',
        '{"t":"dict","v":[1]}',
        '{"t":"Fraction","v":"1/0"}',
        '{"t":"bytes","v":"zz"}',
        '{"t":"ndarray","v":["|O8",[1],["a"]]}',
        '{"t":"ndarray","v":["<f8",[9999999999],[1]]}',
    ],
)
def test_text_that_is_no_value_is_refused(text):
    with pytest.raises(NotPlain):
        decode(text)


def test_keys_that_collide_are_refused():
    modulus = 2**61 - 1
    with pytest.raises(NotPlain, match="equal hashes"):
        decode(_set([i * modulus for i in range(500)]))
    assert len(decode(_set(list(range(500))))) == 500
    assert decode(_set([1] * 500)) == {1}


def test_an_array_of_wide_texts_takes_no_more_than_its_texts():
    assert decode('{"t":"ndarray","v":["<U1000000000",[1],["a"]]}').nbytes == 4


def _set(numbers):
    return f'{{"t":"set","v":[{",".join(map(encode, numbers))}]}}'
