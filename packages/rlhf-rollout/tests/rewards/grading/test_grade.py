"""Verdicts. Programs run without a sandbox here: what is right does not depend on where they run."""

import pytest
from rlhf_core import ProgramLimits
from rlhf_rollout import UnconfinedSandbox
from rlhf_rollout.rewards.grading.formats import read_tests
from rlhf_rollout.rewards.grading.grade import ProgramSettings, close, grade, same_text

SANDBOX = UnconfinedSandbox()
LIMITS = ProgramLimits(wall_s=5.0)


def share(code, tests, *, entry="", setup="", **settings):
    settings = ProgramSettings(go_on=True, limits=LIMITS, **settings)
    return grade(code, read_tests(tests, sample="s", entry=entry, setup=setup), SANDBOX, settings).share


DOUBLE = "def double(x):\n    return 2 * x\n"
STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
"""
STACK_TESTS = """
s = Stack()
s.push(3)
assert len(s) == 1
assert s.pop() == 3
try:
    s.pop()
    assert False
except IndexError:
    pass
"""
CHECK = "def check(candidate):\n    for i in range(50):\n        assert candidate(i) == 2 * i\n"
UNITTEST = """
import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertEqual(double(2), 4)
"""


@pytest.mark.parametrize(
    ("tests", "wanted"),
    [
        ("assert double(2) == 4", 1.0),
        (["assert double(2) == 4", "assert double(2) == 5", "assert double('a') == 'aa'"], 2 / 3),
        ("import math\nassert math.isclose(double(0.1), 0.2)\nassert double(1) < 2", 0.5),
        ("for i in range(20):\n    assert double(i) == i + i", 1.0),
        ("def test_it():\n    assert double(1) == 2\ndef test_not():\n    assert double(1) == 3", 0.5),
        (UNITTEST, 1.0),
        (UNITTEST.replace("4)", "5)"), 0.0),
        (UNITTEST + "if __name__ == '__main__':\n    unittest.main()", 1.0),
        (UNITTEST.replace("4)", "5)") + "if __name__ == '__main__':\n    unittest.main()", 0.0),
        ("assert triple(1) == 3", 0.0),
        ("assert triple(1) + 0 == 3", 0.0),
        ("assert double(2) + 0 == 4\nprint('done')", 1.0),
    ],
)
def test_shares_of_asserts(tests, wanted):
    assert share(DOUBLE, tests) == pytest.approx(wanted)


def test_a_function_check_gets_the_programs():
    assert share(DOUBLE, CHECK, entry="double") == 1
    assert share("def double(x): return 2", CHECK, entry="double") == 0
    assert share(DOUBLE, f"METADATA = {{}}\n{CHECK}\ncheck(double)") == 1


def test_classes_callbacks_and_exceptions_cross():
    assert share(STACK, STACK_TESTS) == 1
    assert share(STACK.replace("self.items.pop()", "9"), STACK_TESTS) == pytest.approx(1 / 3)
    assert share("def each(f, xs): return [f(x) for x in xs]", "assert each(lambda x: x + 1, [1]) == [2]") == 1
    assert share("class P:\n    x = 5\ndef make(): return P()", "assert make().x == 5") == 1
    assert share("def numbers():\n    yield 1\n    yield 2", "assert list(numbers()) == [1, 2]") == 1


def test_setup_runs_before_the_tests():
    assert share(DOUBLE, "assert double(N) == 6", setup="N = 3") == 1


def test_calls_by_name():
    tests = {"inputs": [[1, 2], [2, 2]], "outputs": [3, 5], "fn_name": "add"}
    assert share("class Solution:\n    def add(self, a, b): return a + b", tests) == 0.5
    pairs = {"inputs": [[3]], "outputs": [[[3, 4]]], "fn_name": "pair"}
    assert share("def pair(x): return (x, x + 1)", pairs) == 1
    assert share("def third(): return 1 / 3", {"inputs": [[]], "outputs": [0.333], "fn_name": "third"}) == 0
    loose = {"inputs": [[]], "outputs": [0.333], "fn_name": "third"}
    assert share("def third(): return 1 / 3", loose, tolerance=1e-2) == 1


def test_texts_with_tolerance_and_checker():
    tests = [{"input": "2\n", "output": "4.0"}, {"input": "3", "output": "6\n"}]
    program = "print(2 * int(input()))  "
    assert share(program, tests) == 0.5
    assert share(program, tests, tolerance=1e-6) == 1
    assert share(program, tests, checker=lambda printed, wanted, given: float(int(given) == 2) / 2) == 0.25


def test_other_languages():
    tests = [{"input": "a\n", "output": "a!"}]
    settings = {"command": ("sh", "main.sh"), "file": "main.sh"}
    assert share("read x; echo $x!", tests, **settings) == 1
    compiled = {"compile_command": ("cp", "main.sh", "main"), "command": ("sh", "main"), "file": "main.sh"}
    assert share("read x; echo $x!", tests, **compiled) == 1
    broken = {**compiled, "compile_command": ("false",)}
    assert share("read x; echo $x!", tests, **broken) == 0


def test_code_that_ends_or_prints_at_exit_is_judged_by_its_answers():
    assert (
        share(f"{DOUBLE}\nimport atexit; atexit.register(print, 'bye')\nprint('hello')", "assert double(1) == 2")
        == 1
    )
    assert share(f"{DOUBLE}\nraise SystemExit(0)", "assert double(1) == 2") == 1
    assert share("raise SystemExit(0)", "assert double(1) == 2") == 0
    assert share("import os; os._exit(0)", "assert double(1) < 3") == 0


def test_what_is_passed_before_a_hang_counts_in_part():
    code = "def f(x):\n    while x > 1: pass\n    return x\n"
    settings = ProgramSettings(go_on=True, limits=ProgramLimits(wall_s=1.0))
    for tests in (["assert f(1) == 1", "assert f(2) == 2"], ["assert f(1) < 2", "assert f(2) < 3"]):
        found = grade(code, read_tests(tests, sample="s"), SANDBOX, settings)
        assert (found.share, found.timeout) == (0.5, True)


@pytest.mark.parametrize(
    ("printed", "wanted", "tolerance", "same"),
    [
        ("a \nb\n\n", "a\nb", 0, True),
        ("a b", "a  b", 0, False),
        ("1.0000001 x", "1 x", 1e-6, True),
        ("1.1", "1", 1e-6, False),
        ("nan", "nan", 1e-6, True),
        ("inf", "5", 1e9, False),
        ("1 2", "1", 1, False),
    ],
)
def test_same_text(printed, wanted, tolerance, same):
    assert same_text(printed, wanted, tolerance) is same


def test_close_knows_numbers_from_truths():
    assert close((1, [2.0]), [1, [2]], 0)
    assert close({1: 2}, {"1": 2}, 0)
    assert not close(True, 1, 0)
    assert not close(1, True, 1.0)
    assert not close([1], [1, 2], 0)
    assert not close("1", 1, 1.0)


def test_text_that_no_file_can_hold_is_a_wrong_program():
    assert share("x = '\ud800\0'\ndef f(): return 1", "assert f() == 1") == 0
