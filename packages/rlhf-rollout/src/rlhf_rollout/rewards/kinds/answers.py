"""Verifiable rewards for answers: symbolic equality of mathematics, or equality of text. Use as `module:function`.

reward.function = "rlhf_rollout.rewards.kinds.math:math_answer"
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from rlhf_core import PluginError


def math_answer(completion: str, answer: str, **columns: Any) -> float:
    """1 if the completion's final answer equals the gold answer mathematically, else 0.

    Args:
        completion: free text; the answer is taken from the last `#### ...` line, `\\boxed{...}`, formula or number.
        answer: the gold answer, as text, LaTeX, or a GSM8K solution whose result follows `####`.
        columns: the data's other columns, not used.

    Needs the extra `math`. Comparison is by the math-verify library.

    >>> math_answer("48/2 is 24, so together $\\\\boxed{72}$", "48/2 = 24 ... #### 72")
    1.0
    """
    gold = _parse_gold(answer)
    if not gold:
        raise ValueError(f"the gold answer {answer!r} holds no number or formula; check the column `answer`")
    verify, parse = _math_verify()
    # No time limits of its own: they are signals, which work in a main thread only. The caller's deadline holds.
    predicted = parse(after_hashes(completion), parsing_timeout=None)
    return float(verify(list(gold), predicted, timeout_seconds=None))


def exact_match(completion: str, answer: str, **columns: Any) -> float:
    """1 if the completion, or what follows its `####`, is the gold answer but for surrounding space; else 0.

    >>> exact_match(" 72\\n", "48/2 = 24 ... #### 72"), exact_match("about 72", "72")
    (1.0, 0.0)
    """
    return float(after_hashes(completion).strip() == after_hashes(answer).strip())


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


def check_math_verify() -> None:
    """Find out now whether the math-verify library is there.

    Raises:
        PluginError: it is not.
    """
    if find_spec("math_verify") is None:
        raise PluginError("the reward `math` needs the math-verify library: install rlhf-rollout[math]")


def load_math_verify() -> None:
    """Load the library and what it loads at its first comparison: seconds that belong to no sample."""
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
