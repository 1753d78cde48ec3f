"""Running a program against tests: the program gives data, and what is right is decided where it cannot reach."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_core import Program, ProgramLimits, ProgramOutcome, Sandbox

from rlhf_rollout.rewards.grading import plain_data, two_sides
from rlhf_rollout.rewards.grading.formats import CallTest, SourceTests, Tests, TextTest

Checker = Callable[[str, str, str], float]
"""f(output, wanted, input) -> the share of the test that is passed."""

_SIDES = "two_sides.py"
_FILE = "solution.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSettings:
    """How programs are run and what they print is compared."""

    command: tuple[str, ...] = ("python", "main.py")
    file: str = "main.py"
    compile_command: tuple[str, ...] = ()
    compiled_file: str = "main"
    tolerance: float = 0.0
    checker: Checker | None = None
    go_on: bool = False
    limits: ProgramLimits = field(default_factory=ProgramLimits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """What a program has earned."""

    share: float
    """Of the tests, those that it has passed."""
    timeout: bool = False


def grade(code: str, tests: Tests, sandbox: Sandbox, settings: ProgramSettings) -> Grade:
    """Run a program against its tests.

    Raises:
        SandboxError: the sandbox failed.
    """
    if isinstance(tests, SourceTests):
        return _grade_source(code, tests, sandbox, settings)
    if isinstance(tests[0], CallTest):
        return _grade_calls(code, [test for test in tests if isinstance(test, CallTest)], sandbox, settings)
    return _grade_texts(code, [test for test in tests if isinstance(test, TextTest)], sandbox, settings)


def _grade_source(code: str, tests: SourceTests, sandbox: Sandbox, settings: ProgramSettings) -> Grade:
    job = {
        "sources": list(tests.sources),
        "setup": tests.setup,
        "names": list(tests.names),
        "entry": tests.entry,
        "go_on": settings.go_on,
    }
    files = {_SIDES: _sides(), "job.txt": plain_data.encode(job).encode("ascii")}
    supervisor = Program(command=_python("supervise", "job.txt"), files=files, limits=settings.limits)
    outcome, other = sandbox.run_linked(supervisor, _player(code, settings.limits))
    lines = outcome.stderr.decode(errors="replace").splitlines()
    total, said = 0, []
    for line in lines:
        word, _, rest = line.partition(" ")
        total = int(rest) if word == "tests" and rest.isdigit() else total
        said.append(word)
    # The number of tests was said before the program was asked anything: what it prevents counts as failed.
    total -= said.count("empty")
    share = said.count("passed") / total if total > 0 else 0.0
    return Grade(share=share, timeout="time" in (outcome.limit, other.limit))


def _grade_calls(code: str, tests: list[CallTest], sandbox: Sandbox, settings: ProgramSettings) -> Grade:
    asked = [plain_data.encode(["invoke", t.function, list(t.arguments), dict(t.named)]) for t in tests]
    outcome = sandbox.run(_player(code, settings.limits, stdin="".join(f"{line}\n" for line in asked).encode()))
    answers = outcome.stdout.split(b"\n")
    answers = [*answers[:-1], *[b""] * len(tests)]
    passed = sum(_is_wanted(answer, test, settings) for answer, test in zip(answers, tests, strict=False))
    return Grade(share=passed / len(tests), timeout=outcome.limit == "time")


def _is_wanted(answer: bytes, test: CallTest, settings: ProgramSettings) -> bool:
    try:
        said = plain_data.decode(answer.decode("ascii"))
        if not (isinstance(said, list) and len(said) == 2 and said[0] == "value"):
            return False
        if test.exact:
            return bool(said[1] == test.wanted)
        return close(said[1], test.wanted, settings.tolerance) or (
            # Some data sets have each wanted value in a list of its own.
            isinstance(test.wanted, list)
            and len(test.wanted) == 1
            and close(said[1], test.wanted[0], settings.tolerance)
        )
    except (ValueError, TypeError, RecursionError, ArithmeticError):
        return False


def _grade_texts(code: str, tests: list[TextTest], sandbox: Sandbox, settings: ProgramSettings) -> Grade:
    files, late = _built(code, sandbox, settings)
    earned = 0.0
    if files is None:
        return Grade(share=0.0, timeout=late)
    for test in tests:
        given = test.given.encode(errors="replace")
        outcome = sandbox.run(Program(command=settings.command, files=files, stdin=given, limits=settings.limits))
        late = late or outcome.limit == "time"
        points = _points(outcome, test, settings) if outcome.ok else 0.0
        earned += points
        if points < 1 and not settings.go_on:
            break
    return Grade(share=earned / len(tests), timeout=late)


def _built(code: str, sandbox: Sandbox, settings: ProgramSettings) -> tuple[dict[str, bytes] | None, bool]:
    """The files of a program, compiled if it has to be; None where it cannot be; and whether that took too long."""
    source = {settings.file: code.encode(errors="replace")}
    if not settings.compile_command:
        return source, False
    script = '"$@" >&2 && cat "$0"'
    command = ("sh", "-c", script, settings.compiled_file, *settings.compile_command)
    limits = settings.limits
    compiling = ProgramLimits(
        wall_s=max(60.0, limits.wall_s), memory_bytes=max(1 << 30, limits.memory_bytes), output_bytes=64 << 20
    )
    outcome: ProgramOutcome = sandbox.run(Program(command=command, files=source, limits=compiling))
    return ({settings.compiled_file: outcome.stdout} if outcome.ok else None), outcome.limit == "time"


def _points(outcome: ProgramOutcome, test: TextTest, settings: ProgramSettings) -> float:
    printed = outcome.stdout.decode(errors="replace")
    if settings.checker is not None:
        return min(1.0, max(0.0, float(settings.checker(printed, test.wanted, test.given))))
    return float(same_text(printed, test.wanted, settings.tolerance))


def same_text(printed: str, wanted: str, tolerance: float) -> bool:
    """Whether two texts agree: line by line without spaces at their ends, numbers within a tolerance."""
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, wanted))
    if ours == theirs or not tolerance:
        return ours == theirs
    if len(ours) != len(theirs):
        return False
    words = [(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True)]
    return all(
        len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True)) for a, b in words
    )


def close(value: Any, wanted: Any, tolerance: float) -> bool:
    """Whether plain values agree; lists and tuples are the same, floats may be off by the tolerance."""
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(wanted)
            and all(close(a, b, tolerance) for a, b in zip(value, wanted, strict=True))
        )
    if isinstance(wanted, dict):
        return (
            isinstance(value, dict)
            and {str(k): v for k, v in value.items()}.keys() == {str(k) for k in wanted}
            and all(close({str(k): v for k, v in value.items()}[str(k)], v, tolerance) for k, v in wanted.items())
        )
    if isinstance(wanted, bool) or isinstance(value, bool):
        return value is wanted
    if tolerance and isinstance(wanted, (int, float)) and isinstance(value, (int, float)):
        return _near(float(value), float(wanted), tolerance)
    return bool(value == wanted)


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _same_word(a: str, b: str, tolerance: float) -> bool:
    if a == b:
        return True
    if not (_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b)):
        return False
    return _near(float(a), float(b), tolerance)


def _near(a: float, b: float, tolerance: float) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def _player(code: str, limits: ProgramLimits, *, stdin: bytes = b"") -> Program:
    files = {_SIDES: _sides(), _FILE: code.encode(errors="replace")}
    return Program(command=_python("play", _FILE), files=files, stdin=stdin, limits=limits)


def _python(*arguments: str) -> tuple[str, ...]:
    # Without `site`, which can take longer than the program; `two_sides` finds packages where it must.
    return ("python", "-S", "-s", _SIDES, *arguments)


@lru_cache(maxsize=1)
def _sides() -> bytes:
    """One file of `plain_data` and `two_sides`, without the imports that only types need."""
    texts = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (plain_data, two_sides)]
    unwanted = ("from __future__", "from typing", "from collections.abc", "from rlhf_rollout")
    lines = [line for text in texts for line in text.splitlines() if not line.startswith(unwanted)]
    return "\n".join(["from __future__ import annotations", *lines, ""]).encode()
