"""The kinds of rewards as configuration: one frozen dataclass each, told apart by `kind`, and what each builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_core import ConfigError, RewardFunction
from rlhf_core.engines import DType

from rlhf_rollout.code_reward import CodeReward, CodeRewardConfig
from rlhf_rollout.environment_reward import EnvironmentReward
from rlhf_rollout.http_reward import HTTPReward, HTTPRewardConfig
from rlhf_rollout.judge_reward import JudgeConfig, JudgeReward, template_columns
from rlhf_rollout.math_reward import check_math_verify
from rlhf_rollout.process_reward import ProcessReward, ProcessRewardConfig
from rlhf_rollout.python_reward import PythonReward
from rlhf_rollout.reward_policy import FaultPolicy
from rlhf_rollout.step_reward import StepRewardConfig
from rlhf_rollout.text_rewards import compile_pattern
from rlhf_rollout.too_slow import ZeroIfTooSlow


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """What every kind has. Not a part by itself."""

    # Without slots of its own, it can stand beside a slotted configuration as a second base class.
    __slots__ = ()

    weight: float = 1.0
    """Factor of its score in the sum; 0 only logs it."""
    policy: FaultPolicy | None = None
    """What happens when it fails; that of the whole reward if not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionPart(Weighted):
    """A Python function; see PythonReward for how it is called."""

    kind: Literal["function"] = "function"
    function: str
    """`module:function`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments, the same in every call."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Parameter: the data's column that it takes, where their names differ."""
    isolated: bool = False
    """Run it in processes of its own, which are killed at the deadline: for what may hang, crash or hold Python's
    lock."""
    workers: int = 1
    """Processes, if isolated."""
    timeout_s: float = 60.0
    """Deadline for the samples of one prompt."""

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs; imports the function."""
        settings: dict[str, Any] = {"options": self.options, "columns": self.columns, "timeout_s": self.timeout_s}
        name = f"{name} ({self.function})"
        if self.isolated:
            return _isolated(ProcessRewardConfig(function=self.function, workers=self.workers, **settings), name)
        reward = PythonReward(self.function, name=name, **settings)
        return reward, reward.columns


@dataclass(frozen=True, kw_only=True, slots=True)
class HTTPPart(HTTPRewardConfig, Weighted):
    """A service; see HTTPReward for the messages."""

    kind: Literal["http"] = "http"
    columns: tuple[str, ...] = ()
    """Columns that the service counts on: a row without one is refused at the start. It gets all columns anyway."""

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs."""
        return HTTPReward(self, name=name), frozenset(self.columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgePart(JudgeConfig, Weighted):
    """A language model as the judge."""

    kind: Literal["judge"] = "judge"

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs: those that the template names."""
        return JudgeReward(self, name=name), template_columns(self.template)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodePart(CodeRewardConfig, Weighted):
    """The response's program against tests."""

    kind: Literal["code"] = "code"

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs."""
        return CodeReward(self, name=name), frozenset({self.column})


@dataclass(frozen=True, kw_only=True, slots=True)
class MathPart(Weighted):
    """1 if the response's final answer equals the gold one mathematically, else 0 (see `math_answer`)."""

    kind: Literal["math"] = "math"
    answer: str = "answer"
    """Column of the gold answer."""
    timeout_s: float = 10.0
    """Deadline for the samples of one prompt. A sample that takes that long by itself scores 0."""
    isolated: bool = True
    """Compare in processes that can be killed. Without, an expression like 9^9^9^9 stops the whole run."""
    workers: int = 1
    """Processes, if isolated."""

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs."""
        check_math_verify()
        return _rule(self, "rlhf_rollout.math_reward:math_answer", name, columns={"answer": self.answer})


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactPart(Weighted):
    """1 if the response, or what follows its `####`, is the gold answer, else 0."""

    kind: Literal["exact"] = "exact"
    answer: str = "answer"
    """Column of the gold answer."""

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs."""
        return _plain("rlhf_rollout.math_reward:exact_match", name, columns={"answer": self.answer})


@dataclass(frozen=True, kw_only=True, slots=True)
class FuzzyPart(Weighted):
    """Similarity to the gold answer in [0, 1] (see `fuzzy_match`)."""

    kind: Literal["fuzzy"] = "fuzzy"
    answer: str = "answer"
    """Column of the gold answer."""
    threshold: float = 0.0
    """0 below this similarity."""

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs."""
        options = {"threshold": self.threshold}
        return _plain("rlhf_rollout.text_rewards:fuzzy_match", name, options, {"answer": self.answer})


@dataclass(frozen=True, kw_only=True, slots=True)
class RegexPart(Weighted):
    """1 if the response has the form of a regular expression, else 0."""

    kind: Literal["regex"] = "regex"
    pattern: str
    """A dot matches line breaks too; space around the response does not count."""
    whole: bool = True
    """Match all of the response; false looks for the pattern anywhere in it."""
    timeout_s: float = 10.0
    """Deadline for the samples of one prompt, if isolated. A sample that takes that long by itself scores 0."""
    isolated: bool = False
    """Match in a process that can be killed: for patterns that may backtrack without end."""
    workers: int = 1
    """Processes, if isolated."""

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs: none."""
        options = {"pattern": self.pattern, "whole": self.whole}
        return _rule(self, "rlhf_rollout.text_rewards:format_match", name, options=options)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthPart(Weighted):
    """1 for a response of `low` to `high` tokens, falling linearly to 0 over `slack` tokens outside."""

    kind: Literal["length"] = "length"
    low: int = 0
    high: int
    slack: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or self.slack < 1:
            raise ConfigError(
                f"length: needs 0 <= low <= high and slack >= 1, got {self.low}, {self.high}, {self.slack}"
            )

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs: none."""
        options = {"low": self.low, "high": self.high, "slack": self.slack}
        return _plain("rlhf_rollout.text_rewards:length_match", name, options)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentPart(Weighted):
    """What the environment of an agent's episodes gave, turn by turn."""

    kind: Literal["environment"] = "environment"

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs: none."""
        return EnvironmentReward(), frozenset()


@dataclass(frozen=True, kw_only=True)
class OnRanks(Weighted):
    """What the kinds with a model of their own have. Not a part by itself."""

    __slots__ = ()

    path: str
    """A path is tried first, then a hub name."""
    ranks: int = 1
    """Ranks of its own."""
    engine: str | None = None
    """The policy's training engine if not given."""
    dtype: DType | None = None
    """The policy's if not given."""
    engine_options: Mapping[str, Any] | None = None
    """Settings of the engine; those of the policy if not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPart(OnRanks):
    """A reward model: sequence classification with one label. It reads the sampled tokens: same vocabulary."""

    kind: Literal["model"] = "model"

    def __post_init__(self) -> None:
        _check_ranks(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsPart(StepRewardConfig, OnRanks):
    """A process reward model, which judges every step of a response (see StepReward)."""

    kind: Literal["steps"] = "steps"

    def __post_init__(self) -> None:
        StepRewardConfig.__post_init__(self)
        _check_ranks(self)


EnginePart = ModelPart | StepsPart
"""Kinds that need an engine of their own."""
PlainPart = (
    FunctionPart
    | HTTPPart
    | JudgePart
    | CodePart
    | MathPart
    | ExactPart
    | FuzzyPart
    | RegexPart
    | LengthPart
    | EnvironmentPart
)
"""Kinds that need none."""
RewardPart = EnginePart | PlainPart


def _check_ranks(part: OnRanks) -> None:
    if part.ranks < 1:
        raise ConfigError(f"reward model {part.path!r}: ranks must be at least 1, got {part.ranks}")


def _plain(
    function: str, name: str, options: Mapping[str, Any] | None = None, columns: Mapping[str, str] | None = None
) -> tuple[RewardFunction, frozenset[str]]:
    reward = PythonReward(function, name=name, options=options, columns=columns)
    return reward, reward.columns


def _rule(
    part: MathPart | RegexPart,
    function: str,
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
) -> tuple[RewardFunction, frozenset[str]]:
    """A rule whose work a response can make endless."""
    settings: dict[str, Any] = {"options": options or {}, "columns": columns or {}, "timeout_s": part.timeout_s}
    if not part.isolated:
        reward = PythonReward(function, name=name, **settings)
        return reward, reward.columns
    config = ProcessRewardConfig(function=function, workers=part.workers, **settings)
    isolated, needed = _isolated(config, name)
    return ZeroIfTooSlow(isolated, name=name), needed


def _isolated(config: ProcessRewardConfig, name: str) -> tuple[RewardFunction, frozenset[str]]:
    reward = ProcessReward(config, name=name)
    try:
        return reward, reward.check()
    except BaseException:
        reward.close()
        raise
