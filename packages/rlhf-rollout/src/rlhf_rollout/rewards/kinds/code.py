"""Code execution against tests as a reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_core import (
    ConfigError,
    DataError,
    ProgramLimits,
    RewardError,
    RewardFunction,
    Sandbox,
    SandboxError,
    Score,
    Trajectory,
    load_object,
)

from rlhf_rollout.rewards.grading.extract import PYTHON, extract_code
from rlhf_rollout.rewards.grading.formats import Tests, TextTest, read_tests
from rlhf_rollout.rewards.grading.grade import Checker, Grade, ProgramSettings, grade
from rlhf_rollout.rewards.kind import RewardConfig
from rlhf_rollout.sandbox.choice import open_sandbox

_PYTHON_COMMAND = ("python", "main.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeRewardConfig(RewardConfig):
    """The response's program against tests: where the tests are, and where and how programs are run."""

    kind: Literal["code"] = "code"
    column: str = "tests"
    """Column with the tests of a prompt: Python source with asserts, a list of such sources (MBPP), a list of
    {"input", "output"}, or {"inputs", "outputs", "fn_name"}; as they are, or as JSON."""
    entry_column: str = "entry_point"
    """Column with the name of the program's function, for tests that do not name it: `check(candidate)`, calls."""
    setup_column: str | None = None
    """Column with Python source, or a list of sources, that runs before the tests (`test_setup_code` of MBPP)."""
    sandbox: str = "auto"
    """Where programs run: `bubblewrap`, `container` or `container:IMAGE` (docker or podman), the address of a
    server (`rlhf serve-sandbox`), `auto` for the first of bubblewrap and container that works here, or `none`,
    which protects nothing and warns."""
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    """For each run of the program."""
    workers: int = 4
    """Programs at the same time."""
    partial: bool = False
    """True: the share of passed tests; False: 1 if all pass, else 0."""
    tolerance: float = 0.0
    """Numbers may be off by it, relative and absolute, in texts and in what calls return (not in asserts)."""
    checker: str | None = None
    """`module:function` f(output, wanted, input) -> 0 to 1 that compares texts, in this process."""
    command: tuple[str, ...] = _PYTHON_COMMAND
    """Runs the program, whose tests are then texts: ["node", "main.js"], ["./main"]."""
    file: str = "main.py"
    """Name of the file that the response's program is written to."""
    compile_command: tuple[str, ...] = ()
    """Makes `compiled_file` of `file` first: ["g++", "-O2", "-o", "main", "main.cpp"]."""
    compiled_file: str = "main"
    """The one file that is kept of compiling."""
    languages: tuple[str, ...] = PYTHON
    """Names after a fence that the program is looked for behind."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"code reward: workers must be at least 1, got {self.workers}")
        if self.tolerance < 0:
            raise ConfigError(f"code reward: tolerance must not be negative, got {self.tolerance}")
        if not self.command:
            raise ConfigError("code reward: command is empty; write for instance ['node', 'main.js']")

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs.

        Raises:
            CapabilityError: there is no such sandbox here.
            PluginError: the checker cannot be imported.
        """
        needed = {self.column} | ({self.setup_column} if self.setup_column else set())
        return CodeReward(self, name=name), frozenset(needed)


class CodeReward:
    """RewardFunction that runs the program in the last fenced block of a response (or all of it) against tests.

    A program that fails, hangs or is stopped at a limit has a score of 0: that is an answer and no error.
    Components: `passed` (share), `timeout`, `no_code`.

    Raises:
        CapabilityError: there is no such sandbox here.
        PluginError: the checker cannot be imported.
    """

    def __init__(
        self, config: CodeRewardConfig | None = None, *, name: str = "code", sandbox: Sandbox | None = None
    ) -> None:
        """Open the sandbox that the configuration names, unless one is given, which stays the caller's."""
        self.name = name
        self._config = config = config or CodeRewardConfig()
        checker: Checker | None = load_object(config.checker, what="checker") if config.checker else None
        self._settings = ProgramSettings(
            command=config.command,
            file=config.file,
            compile_command=config.compile_command,
            compiled_file=config.compiled_file,
            tolerance=config.tolerance,
            checker=checker,
            go_on=config.partial,
            limits=config.limits,
        )
        self._sandbox = sandbox or open_sandbox(config.sandbox, what=f"reward {name!r}")
        self._owned = sandbox is None
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="code reward")

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction.

        Raises:
            DataError: a sample's row has no tests, or tests of another form.
            RewardError: the sandbox failed.
        """
        tests = [self._tests_of(trajectory) for trajectory in trajectories]
        calls = [
            self._threads.submit(self._score, trajectory, text, one)
            for trajectory, text, one in zip(trajectories, texts, tests, strict=True)
        ]
        return list(await asyncio.gather(*map(asyncio.wrap_future, calls)))

    def close(self) -> None:
        """End the threads and let go of the sandbox; programs that run are left to their deadlines."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._owned:
            self._sandbox.close()

    def _tests_of(self, trajectory: Trajectory) -> Tests:
        config, row, sample = self._config, trajectory.metadata, trajectory.sample_id
        if config.column not in row or row[config.column] is None:
            raise DataError(f"code reward: sample {sample!r} needs the column {config.column!r} with tests")
        setup: Any = row.get(config.setup_column, "") if config.setup_column else ""
        if not isinstance(setup, str):
            setup = "\n".join(map(str, [] if setup is None else setup))
        entry = row.get(config.entry_column)
        tests = read_tests(row[config.column], sample=sample, entry=str(entry or ""), setup=setup)
        if config.command != _PYTHON_COMMAND and not (isinstance(tests, tuple) and isinstance(tests[0], TextTest)):
            raise DataError(
                f"code reward: sample {sample!r} has tests in Python, but programs are run by "
                f"{' '.join(config.command)}; give {{'input', 'output'}}"
            )
        return tests

    def _score(self, trajectory: Trajectory, text: str, tests: Tests) -> Score:
        code = extract_code(text, self._config.languages)
        if not code.strip():
            return Score(value=0.0, components={"passed": 0.0, "timeout": 0.0, "no_code": 1.0})
        try:
            found: Grade = grade(code, tests, self._sandbox, self._settings)
        except (SandboxError, OSError) as error:  # OSError: no descriptors or processes left here
            raise RewardError(f"reward {self.name}: {error}", sample_ids=(trajectory.sample_id,)) from error
        value = found.share if self._config.partial else float(found.share == 1)
        components = {"passed": found.share, "timeout": float(found.timeout), "no_code": 0.0}
        return Score(value=value, components=components)
