"""Rule-based rewards from the text alone. Use as `module:function`; what is keyword-only is an option.

reward.function = "rlhf_rollout.rewards.kinds.text:format_match", reward.options = {pattern: "<think>.*</think>.*"}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rlhf_core import ConfigError

from rlhf_rollout.rewards.kinds.math import after_hashes


def format_match(completion: str, *, pattern: str, whole: bool = True, **columns: Any) -> float:
    """1 if the completion has the form of a regular expression, else 0.

    Args:
        completion: the response; space around it does not count.
        pattern: regular expression in which a dot matches line breaks too.
        whole: match all of the completion; False looks for the pattern anywhere in it.
        columns: the data's other columns, not used.

    Patterns that backtrack without end are cut off by the reward's deadline only in a `IsolatedReward`.

    >>> form = "<think>.*</think>.*"
    >>> format_match("<think>6 * 7</think> 42", pattern=form), format_match("42", pattern=form)
    (1.0, 0.0)
    """
    expression = compile_pattern(pattern)
    text = completion.strip()
    return float(bool(expression.fullmatch(text) if whole else expression.search(text)))


def fuzzy_match(completion: str, answer: str, *, threshold: float = 0.0, **columns: Any) -> float:
    """Similarity of completion and gold answer in [0, 1] (Ratcliff/Obershelp), 0 below `threshold`.

    Case and runs of space do not count; of a text with `####`, what follows it is compared.

    >>> fuzzy_match("The  Eiffel tower", "the Eiffel Tower"), fuzzy_match("abcd", "bcde"), fuzzy_match("x", "y")
    (1.0, 0.75, 0.0)
    """
    left, right = (" ".join(after_hashes(text).casefold().split()) for text in (completion, answer))
    ratio = difflib.SequenceMatcher(None, left, right, autojunk=False).ratio()
    return ratio if ratio >= threshold else 0.0


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
        ConfigError: it is none.
    """
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"format_match: {pattern!r} is not a regular expression: {error}") from error
