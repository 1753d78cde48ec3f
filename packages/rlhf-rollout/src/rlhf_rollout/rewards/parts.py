"""The kinds of rewards as configuration: one frozen dataclass each, told apart by `kind`, and what each builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_core import RewardFunction

from rlhf_rollout.rewards.function import PythonReward
from rlhf_rollout.rewards.isolated import IsolatedRewardConfig
from rlhf_rollout.rewards.kind import Weighted
from rlhf_rollout.rewards.kinds.code import CodeReward, CodeRewardConfig
from rlhf_rollout.rewards.kinds.environment import EnvironmentReward
from rlhf_rollout.rewards.kinds.http import HTTPReward, HTTPRewardConfig
from rlhf_rollout.rewards.kinds.judge import JudgeConfig, JudgeReward, template_columns
from rlhf_rollout.rewards.kinds.model import ModelPart, StepsPart
from rlhf_rollout.rewards.kinds.rules import ExactPart, FuzzyPart, LengthPart, MathPart, RegexPart, start_isolated


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
            return start_isolated(
                IsolatedRewardConfig(function=self.function, workers=self.workers, **settings), name
            )
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
class EnvironmentPart(Weighted):
    """What the environment of an agent's episodes gave, turn by turn."""

    kind: Literal["environment"] = "environment"

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs: none."""
        return EnvironmentReward(), frozenset()


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
