"""Foreign values as ours."""

from __future__ import annotations

from typing import Any


def number_or_text(word: str) -> Any:
    """A word of a command line as a whole number, a number, or text."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def scheduler(name: Any) -> str:
    """Our name of a learning-rate schedule of Transformers.

    Raises:
        ValueError: we have none such.
    """
    ours = {
        "cosine_with_min_lr": "cosine",
        "cosine": "cosine",
        "linear": "linear",
        "constant": "constant",
        "constant_with_warmup": "constant",
        "inverse_sqrt": "inverse_sqrt",
        "warmup_stable_decay": "wsd",
        "none": "constant",
    }
    if name not in ours:
        raise ValueError(f"there are {', '.join(ours)}")
    return ours[name]


def dtype(name: Any) -> str:
    """Our name of the numbers in which a model runs."""
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[name]


def every(steps: Any) -> int:
    """Steps between two events; -1 stands for never, which is our 0."""
    return max(0, int(steps))
