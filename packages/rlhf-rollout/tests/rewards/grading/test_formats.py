"""Tests as data sets have them."""

import json

import numpy as np
import pytest
from rlhf_core import DataError
from rlhf_rollout.rewards.grading.formats import CallTest, SourceTests, TextTest, read_tests


def read(found, **more):
    return read_tests(found, sample="s0", **more)


def call(function, arguments, wanted, *, named=None, exact=True):
    return CallTest(function=function, arguments=arguments, named=named or {}, wanted=wanted, exact=exact)


@pytest.mark.parametrize(
    "found",
    [
        "assert f(1, x=[2]) == 3\nassert g() == {'a': 1}",
        ["assert f(1, x=[2]) == 3", "assert g() == {'a': 1}"],
        np.array(["assert f(1, x=[2]) == 3", "assert g() == {'a': 1}"]),
        json.dumps(["assert f(1, x=[2]) == 3", "assert g() == {'a': 1}"]),
        "['assert f(1, x=[2]) == 3', \"assert g() == {'a': 1}\"]",
    ],
)
def test_simple_asserts_become_calls(found):
    assert read(found) == (call("f", (1,), 3, named={"x": [2]}), call("g", (), {"a": 1}))


@pytest.mark.parametrize(
    "source",
    [
        "assert f(1) < 2",
        "assert abs(f(1) - 2) < 1e-6",
        "x = 1\nassert f(x) == 2",
        "assert f(*[1]) == 2",
        "assert f(**{'a': 1}) == 2",
        "assert f(1) == f(2)",
        "assert sorted(f(1)) == [1]",
    ],
)
def test_other_asserts_stay_source(source):
    tests = read(source)
    assert isinstance(tests, SourceTests)
    assert tests.names == ("f",)


def test_names_of_the_program_are_those_that_tests_use_and_do_not_make():
    source = "import math\ndef near(a, b): return math.isclose(a, b)\nassert near(area(Point(1)), 2)"
    tests = read(source, setup="from x import y")
    assert isinstance(tests, SourceTests)
    assert set(tests.names) == {"area", "Point"}
    assert read("def check(candidate):\n    assert candidate(1) == 2", entry="sum").names == ("sum",)


@pytest.mark.parametrize(
    "found",
    [
        [{"input": "1", "output": "2"}],
        '[{"input": "1", "output": "2"}]',
        {"inputs": ["1"], "outputs": ["2"]},
        {"inputs": np.array(["1"]), "outputs": ["2"], "fn_name": None},
        json.dumps({"inputs": [["1"]], "outputs": [["2"]]}),
        {"input": 1, "output": 2},
        [{"input": "1", "output": "2", "testtype": "stdin"}],
    ],
)
def test_texts(found):
    assert read(found) == (TextTest(given="1", wanted="2"),)


@pytest.mark.parametrize(
    "found",
    [
        {"inputs": [[1, "a"]], "outputs": [[3]], "fn_name": "f"},
        [{"input": '1\n"a"', "output": "[3]", "testtype": "functional"}],
    ],
)
def test_calls_by_name(found):
    assert read(found, entry="f") == (call("f", (1, "a"), [3], exact=False),)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "no form"),
        ("", "are empty"),
        ("   ", "are empty"),
        ([], "no form"),
        ("[]", "no form"),
        ("5", "single value"),
        ('"assert f(1) == 2"', "single value"),
        ("true", "single value"),
        ("pass", "assert nothing"),
        ("f(1)", "assert nothing"),
        (["assert f(1) == 2", "f(2)"], "assert nothing"),
        ("assert 1 + 1 == 2", "never use the program"),
        ("assert (", "never closed"),
        ([{"input": "1"}], "no form"),
        ([{"input": "1", "output": "2"}, {"input": "1", "output": "2", "fn_name": "f"}], "mix"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "name of the function"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        (7, "no form"),
    ],
)
def test_tests_that_tell_nothing_are_refused(found, reason):
    with pytest.raises(DataError, match=f"'s0'.*({reason})"):
        read(found)
