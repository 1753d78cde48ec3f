"""Kinds of rewards that are rules about the text: answers, form, length. See `reward_parts` for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core import ConfigError, RewardFunction

from rlhf_rollout.rewards.function import PythonReward
from rlhf_rollout.rewards.isolated import IsolatedReward, IsolatedRewardConfig
from rlhf_rollout.rewards.kind import Weighted
from rlhf_rollout.rewards.kinds.math import check_math_verify
from rlhf_rollout.rewards.kinds.text import compile_pattern
from rlhf_rollout.rewards.too_slow import ZeroIfTooSlow


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
        return _rule(self, "rlhf_rollout.rewards.kinds.math:math_answer", name, columns={"answer": self.answer})


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactPart(Weighted):
    """1 if the response, or what follows its `####`, is the gold answer, else 0."""

    kind: Literal["exact"] = "exact"
    answer: str = "answer"
    """Column of the gold answer."""

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs."""
        return _plain("rlhf_rollout.rewards.kinds.math:exact_match", name, columns={"answer": self.answer})


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
        return _plain("rlhf_rollout.rewards.kinds.text:fuzzy_match", name, options, {"answer": self.answer})


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
        return _rule(self, "rlhf_rollout.rewards.kinds.text:format_match", name, options=options)


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
        return _plain("rlhf_rollout.rewards.kinds.text:length_match", name, options)


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
    prepare = "rlhf_rollout.rewards.kinds.math:load_math_verify" if isinstance(part, MathPart) else None
    config = IsolatedRewardConfig(function=function, workers=part.workers, prepare=prepare, **settings)
    isolated, needed = start_isolated(config, name)
    return ZeroIfTooSlow(isolated, name=name), needed


def start_isolated(config: IsolatedRewardConfig, name: str) -> tuple[RewardFunction, frozenset[str]]:
    """The reward with a worker that has imported its function, and the columns that it needs."""
    reward = IsolatedReward(config, name=name)
    try:
        return reward, reward.check()
    except BaseException:
        reward.close()
        raise
