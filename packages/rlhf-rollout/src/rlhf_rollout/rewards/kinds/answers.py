"""Verifiable rewards for answers: symbolic equality of mathematics, equality and likeness of text.

As functions, for instance `reward.function: rlhf_rollout:math_answer`, and as kinds of reward.
"""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

from rlhf_core import PluginError, RewardFunction

from rlhf_rollout.rewards.functions.isolated import IsolatedRewardConfig, import_path
from rlhf_rollout.rewards.functions.python import PythonReward
from rlhf_rollout.rewards.functions.verifier import open_verifier
from rlhf_rollout.rewards.kind import RewardConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MathRewardConfig(RewardConfig):
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
        config = IsolatedRewardConfig(
            function=import_path(math_answer),
            columns={"answer": self.answer},
            prepare=import_path(load_math_verify),
            timeout_s=self.timeout_s,
            workers=self.workers,
        )
        return open_verifier(config, name=name, isolated=self.isolated)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactRewardConfig(RewardConfig):
    """1 if the response, or what follows its `####`, is the gold answer, else 0."""

    kind: Literal["exact"] = "exact"
    answer: str = "answer"
    """Column of the gold answer."""

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs."""
        return PythonReward(exact_match, name=name, columns={"answer": self.answer}), frozenset({self.answer})


@dataclass(frozen=True, kw_only=True, slots=True)
class FuzzyRewardConfig(RewardConfig):
    """Similarity to the gold answer in [0, 1] (see `fuzzy_match`)."""

    kind: Literal["fuzzy"] = "fuzzy"
    answer: str = "answer"
    """Column of the gold answer."""
    threshold: float = 0.0
    """0 below this similarity."""

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs."""
        reward = PythonReward(
            fuzzy_match, name=name, options={"threshold": self.threshold}, columns={"answer": self.answer}
        )
        return reward, frozenset({self.answer})


def math_answer(completion: str, answer: str, **columns: Any) -> float:
    """1 if the completion's final answer equals the gold answer mathematically, else 0.

    Args:
        completion: free text; the answer is taken from the last `#### ...` line, `\\boxed{...}`, formula or number.
        answer: the gold answer, as text, LaTeX, or a GSM8K solution whose result follows `####`.
        columns: the data's other columns, not used.

    Needs the extra `math`. Comparison is by the math-verify library. Where the gold answer is a number, a sum, a
    product or (of a whole number) a quotient of numbers is no answer, though it is equal: a policy that repeats the
    question, "To find 68 + 59, we need to ...", has not answered it.

    >>> math_answer("48/2 is 24, so together $\\\\boxed{72}$", "48/2 = 24 ... #### 72")
    1.0
    >>> math_answer("48 + 24", "72")
    0.0
    """
    gold = _parse_gold(answer)
    if not gold:
        raise ValueError(f"the gold answer {answer!r} holds no number or formula; check the column `answer`")
    verify, parse = _math_verify()
    # No time limits of its own: they are signals, which work in a main thread only. The caller's deadline holds.
    predicted = parse(after_hashes(completion), parsing_timeout=None)
    if any(_is_rational(one) and not _is_calculation(one, whole=False) for one in gold):
        whole = any(getattr(one, "is_Integer", False) for one in gold)
        predicted = [one for one in predicted if not _is_calculation(one, whole=whole)]
    return float(verify(list(gold), predicted, timeout_seconds=None))


def exact_match(completion: str, answer: str, **columns: Any) -> float:
    """1 if the completion, or what follows its `####`, is the gold answer but for surrounding space; else 0.

    >>> exact_match(" 72\\n", "48/2 = 24 ... #### 72"), exact_match("about 72", "72")
    (1.0, 0.0)
    """
    return float(after_hashes(completion).strip() == after_hashes(answer).strip())


def fuzzy_match(completion: str, answer: str, *, threshold: float = 0.0, **columns: Any) -> float:
    """Similarity of completion and gold answer in [0, 1] (Ratcliff/Obershelp), 0 below `threshold`.

    Case and runs of space do not count; of a text with `####`, what follows it is compared.

    >>> fuzzy_match("The  Eiffel tower", "the Eiffel Tower"), fuzzy_match("abcd", "bcde"), fuzzy_match("x", "y")
    (1.0, 0.75, 0.0)
    """
    left, right = (" ".join(after_hashes(text).casefold().split()) for text in (completion, answer))
    ratio = difflib.SequenceMatcher(None, left, right, autojunk=False).ratio()
    return ratio if ratio >= threshold else 0.0


def after_hashes(text: str) -> str:
    """What follows the last `####` on its line (GSM8K's mark of the result); the whole text if there is none.

    >>> after_hashes("6 * 7 = 42\\n#### 1,042\\nDone."), after_hashes("42")
    ('1,042', '42')
    """
    _, mark, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0].strip() if mark and tail.strip() else text


@lru_cache(maxsize=65536)
def _parse_gold(answer: str) -> tuple[Any, ...]:
    """The gold answer's candidates; every sample of a prompt asks for the same one."""
    _, parse = _math_verify()
    text = after_hashes(answer)
    # A bare formula or interval, unlike a bare number, is only recognised between dollar signs.
    return tuple(parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None))


def _is_number(parsed: Any) -> bool:
    return bool(getattr(parsed, "is_Rational", False) or getattr(parsed, "is_Float", False))


def _is_rational(parsed: Any) -> bool:
    return bool(getattr(parsed, "is_number", False) and (parsed.is_rational or parsed.is_Float))


def _is_calculation(parsed: Any, *, whole: bool) -> bool:
    """Whether a parsed answer (math-verify does not evaluate it) has a sum or product of numbers to be worked out.

    Args:
        parsed: an expression, or its text.
        whole: whether the gold answer is a whole number, which a quotient is not as long as it stands there.
    """
    if not hasattr(parsed, "args"):
        return False
    if parsed.is_Add and sum(_is_rational(one) for one in parsed.args) > 1:
        return True
    if parsed.is_Mul:
        factors = [one for one in parsed.args if _is_number(one) and one not in (1, -1) and not _is_percent(one)]
        divided = any(one.is_Pow and one.exp == -1 and _is_number(one.base) for one in parsed.args)
        if len(factors) > 1 or (whole and factors and divided):
            return True
    return any(_is_calculation(one, whole=whole) for one in parsed.args)


def _is_percent(number: Any) -> bool:
    return bool(number.is_Rational) and (number.p, number.q) == (1, 100)


def check_math_verify() -> None:
    """Check that the math-verify library is installed.

    Raises:
        PluginError: the library is not installed.
    """
    if find_spec("math_verify") is None:
        raise PluginError("the reward `math` needs the math-verify library: install rlhf-rollout[math]")


def load_math_verify() -> None:
    """Load math-verify and what it loads at its first comparison, which takes seconds."""
    math_answer("\\boxed{\\frac{1}{2}}", "0.5")


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Any, Any]:
    """math-verify's `verify` and `parse`; loaded on first use, since it needs an extra."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError(
            "math_answer needs the math-verify library: install rlhf-rollout[math], or use exact_match"
        ) from error
    # It warns once that its own time limits are off; that is on purpose here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return verify, parse
