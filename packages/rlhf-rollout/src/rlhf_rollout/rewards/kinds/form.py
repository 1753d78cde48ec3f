"""Rewards for the form of a response: a regular expression, a length. As functions and as kinds of reward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from rlhf_core import ConfigError, RewardFunction

from rlhf_rollout.rewards.functions.isolated import IsolatedRewardConfig, import_path
from rlhf_rollout.rewards.functions.python import PythonReward
from rlhf_rollout.rewards.functions.verifier import open_verifier
from rlhf_rollout.rewards.kind import RewardConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RegexRewardConfig(RewardConfig):
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
        config = IsolatedRewardConfig(
            function=import_path(format_match),
            options={"pattern": self.pattern, "whole": self.whole},
            timeout_s=self.timeout_s,
            workers=self.workers,
        )
        return open_verifier(config, name=name, isolated=self.isolated)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRewardConfig(RewardConfig):
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
        return PythonReward(length_match, name=name, options=options), frozenset()


def format_match(completion: str, *, pattern: str, whole: bool = True, **columns: Any) -> float:
    """1 if the completion has the form of a regular expression, else 0.

    Args:
        completion: the response; space around it does not count.
        pattern: regular expression in which a dot matches line breaks too.
        whole: match all of the completion; False looks for the pattern anywhere in it.
        columns: the data's other columns, not used.

    Patterns that backtrack without end are cut off by the reward's deadline only in an `IsolatedReward`.

    >>> form = "<think>.*</think>.*"
    >>> format_match("<think>6 * 7</think> 42", pattern=form), format_match("42", pattern=form)
    (1.0, 0.0)
    """
    expression = compile_pattern(pattern)
    text = completion.strip()
    return float(bool(expression.fullmatch(text) if whole else expression.search(text)))


def length_match(
    completion_ids: Sequence[int], completion: str, *, low: int = 0, high: int, slack: int = 1, **columns: Any
) -> float:
    """1 for a response of `low` to `high` tokens, falling linearly to 0 over `slack` tokens outside.

    >>> [length_match([7] * n, "", low=2, high=4, slack=2) for n in (0, 1, 2, 4, 5, 6)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if not 0 <= low <= high or slack < 1:
        raise ConfigError(f"length_match: needs 0 <= low <= high and slack >= 1, got {low}, {high}, {slack}")
    length = len(completion_ids)
    return max(0.0, 1.0 - max(low - length, length - high, 0) / slack)


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression, in which a dot matches line breaks too.

    Raises:
        ConfigError: `pattern` is not a regular expression.
    """
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"format_match: {pattern!r} is not a regular expression: {error}") from error
