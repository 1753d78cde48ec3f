"""Code execution against tests as a reward."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_core import ConfigError, DataError, RewardFunction, Score, Trajectory

from rlhf_rollout.rewards.kind import RewardConfig
from rlhf_rollout.rewards.sandbox import ProgramLimits, ProgramResult, run_program

_FENCE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeRewardConfig(RewardConfig):
    """The response's program against tests: where the tests are and how they are run."""

    kind: Literal["code"] = "code"
    column: str = "tests"
    """Column with the tests of a prompt: Python source (asserts) that is run after the program, or a list of
    {"input", "output"} of which the program gets the one on standard input and must print the other."""
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    """For each run of the program."""
    workers: int = 4
    """Programs at the same time."""
    partial: bool = False
    """True: the share of passed tests; False: 1 if all pass, else 0."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"code reward: workers must be at least 1, got {self.workers}")

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs."""
        return CodeReward(self, name=name), frozenset({self.column})


class CodeReward:
    """RewardFunction that runs the program in the last fenced block of a response (or all of it) against tests.

    A program that fails, hangs or is stopped at a limit has a score of 0: that is an answer and no error.
    Components: `passed` (share), `timeout`, `no_code`.
    """

    def __init__(self, config: CodeRewardConfig | None = None, *, name: str = "code") -> None:
        self.name = name
        self._config = config or CodeRewardConfig()
        self._threads = ThreadPoolExecutor(self._config.workers, thread_name_prefix="code reward")

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction.

        Raises:
            DataError: a sample's row has no tests, or tests of another form.
        """
        calls = [
            self._threads.submit(self._grade, extract_code(text), tests_of(trajectory, self._config.column))
            for trajectory, text in zip(trajectories, texts, strict=True)
        ]
        return list(await asyncio.gather(*map(asyncio.wrap_future, calls)))

    def close(self) -> None:
        """End the threads; programs that run are left to their deadlines."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _grade(self, code: str, tests: str | Sequence[tuple[str, str]]) -> Score:
        if not code.strip():
            return Score(value=0.0, components={"passed": 0.0, "timeout": 0.0, "no_code": 1.0})
        verdicts: list[bool] = []
        timeouts = 0
        for test in [tests] if isinstance(tests, str) else tests:
            passed, result = self._run_asserts(code, test) if isinstance(test, str) else self._run_pair(code, *test)
            verdicts.append(passed)
            timeouts += result.status == "timeout"
            if not passed and not self._config.partial:
                break
        share = sum(verdicts) / (1 if isinstance(tests, str) else len(tests))
        value = share if self._config.partial else float(share == 1)
        return Score(value=value, components={"passed": share, "timeout": float(timeouts > 0), "no_code": 0.0})

    def _run_asserts(self, code: str, tests: str) -> tuple[bool, ProgramResult]:
        # A word that only the end of the tests prints: a program that leaves early has passed nothing.
        word = secrets.token_hex(16)
        result = run_program(f"{code}\n\n{tests}\n\nprint({word!r})\n", limits=self._config.limits)
        return result.status == "ok" and result.stdout.rstrip().endswith(word), result

    def _run_pair(self, code: str, given: str, wanted: str) -> tuple[bool, ProgramResult]:
        result = run_program(code, stdin=given, limits=self._config.limits)
        return result.status == "ok" and _lines(result.stdout) == _lines(wanted), result


def extract_code(text: str) -> str:
    """The last fenced block; all of the text if there is none.

    >>> extract_code("So:\\n```python\\nprint(1)\\n```\\nDone."), extract_code("print(2)")
    ('print(1)\\n', 'print(2)')
    """
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def tests_of(trajectory: Trajectory, column: str) -> str | list[tuple[str, str]]:
    """The tests in a sample's column, as source or as (input, output) pairs.

    Raises:
        DataError: the column is missing, or has another form.
    """
    tests: Any = trajectory.metadata.get(column)
    if isinstance(tests, str) and tests.strip():
        return tests
    pairs = list(tests) if isinstance(tests, Sequence) and not isinstance(tests, str) else []
    if pairs and all(isinstance(pair, Mapping) and {"input", "output"} <= set(pair) for pair in pairs):
        return [(str(pair["input"]), str(pair["output"])) for pair in pairs]
    raise DataError(
        f"code reward: sample {trajectory.sample_id!r} needs the column {column!r} with Python source or a list of "
        f"{{'input', 'output'}}, found {str(tests)[:80]!r}"
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
