"""Thoughts in a turn: what stands before `</think>`. Calls that are only thought of are not made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_END = "</think>"


def knows_thoughts(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template sets thoughts apart."""
    return _END in str(getattr(tokenizer, "chat_template", None))


def begins_inside_thought(tokenizer: Any, before: Sequence[int]) -> bool:
    """Whether the tokens before a turn have begun a thought for the model, as some templates do."""
    return tokenizer.decode(list(before)[-8:]).rstrip().endswith("<think>")


def split_thought(text: str, *, inside: bool) -> tuple[str, str]:
    """The thought of a turn, and what follows it; a thought that never ends is followed by nothing.

    >>> split_thought("<think>Hm.</think>Yes.", inside=False)
    ('Hm.', 'Yes.')
    >>> split_thought("Hm.</think>Yes.", inside=True)
    ('Hm.', 'Yes.')
    """
    if not (inside or text.lstrip().startswith("<think>")):
        return "", text
    thought, _, rest = text.partition(_END)
    return thought.replace("<think>", "", 1).strip("\n"), rest.lstrip("\n")
