import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import ConfigError, check_choice, check_number, check_switch, check_whole


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1e-6", None, True, [1.0]], ids=repr)
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(ConfigError, match=r"^part: rate must be a finite number, got "):
        check_number("part: rate", value)


@pytest.mark.parametrize(
    ("bounds", "value", "allowed"),
    [
        ({"at_least": 0}, -1e-9, "at least 0, got -1e-09"),
        ({"above": 0}, 0, "above 0, got 0"),
        ({"at_most": 1}, 1.5, "at most 1, got 1.5"),
        ({"below": 1}, 1.0, r"below 1, got 1\.0"),
        ({"above": 0, "at_most": 1}, 2, "above 0 and at most 1, got 2"),
        ({"at_least": 0, "below": 1}, -1, "at least 0 and below 1, got -1"),
    ],
)
def test_a_number_outside_its_bounds_is_refused_with_all_of_them(bounds, value, allowed):
    with pytest.raises(ConfigError, match=f"^x must be {allowed}$"):
        check_number("x", value, **bounds)


@given(value=st.floats(allow_nan=False, allow_infinity=False), low=st.integers(-5, 5), high=st.integers(-5, 5))
def test_closed_and_open_bounds_mean_what_they_say(value, low, high):
    for bounds, inside in (
        ({"at_least": low, "at_most": high}, low <= value <= high),
        ({"above": low, "below": high}, low < value < high),
    ):
        if inside:
            check_number("x", value, **bounds)
        else:
            with pytest.raises(ConfigError, match=r"^x must be"):
                check_number("x", value, **bounds)


@pytest.mark.parametrize("value", [1.0, "1", None, True], ids=repr)
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(ConfigError, match=r"^x must be a whole number, got "):
        check_whole("x", value)


def test_a_whole_number_that_is_too_small_is_refused():
    check_whole("x", 1, at_least=1)
    with pytest.raises(ConfigError, match=r"^x must be at least 1, got 0$"):
        check_whole("x", 0, at_least=1)


def test_the_text_no_is_not_false():
    check_switch("x", False)
    for value in ("no", 0, None):
        with pytest.raises(ConfigError, match=r"^x must be true or false, got "):
            check_switch("x", value)


def test_an_unknown_choice_gets_the_nearest():
    check_choice("x", 2, (0, 1, 2))
    with pytest.raises(ConfigError, match=r"one of float32, bfloat16, got 'bflot16'; did you mean 'bfloat16'\?$"):
        check_choice("x", "bflot16", ("float32", "bfloat16"))
    with pytest.raises(ConfigError, match=r"^x must be one of 0, 1, got '1'"):
        check_choice("x", "1", (0, 1))
    with pytest.raises(ConfigError, match=r"^x must be one of 0, 1, got True"):
        check_choice("x", True, (0, 1))
