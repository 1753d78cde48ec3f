"""Fields of OpenAI's requests: which are honoured, which may stand only at what is the case anyway, their types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rlhf_core import CapabilityError, DataError

T = TypeVar("T")

MOST_CHOICES = 1024

_SAMPLING = {
    *("model", "n", "seed", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "stream", "stream_options", "logprobs", "return_tokens_as_token_ids"),
    "response_format",
}
_HONOURED = {
    "chat": _SAMPLING | {"messages", "tools", "tool_choice", "max_completion_tokens", "chat_template_kwargs"},
    "completion": _SAMPLING | {"prompt"},
}
_LABELS = ("user", "safety_identifier", "prompt_cache_key", "request_id")
"""Names that a client gives to itself or to a request; no answer depends on them."""

_AS_IT_IS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prompt_logprobs": (),
    "return_token_ids": (True,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Fields that change nothing at these values, and are refused at all others."""


def check_fields(body: Mapping[str, Any], *, chat: bool) -> None:
    """Refuse fields that are not honoured, by name.

    Raises:
        DataError, CapabilityError: a field, and what may be written instead.
    """
    honoured = _HONOURED["chat" if chat else "completion"]
    for name, value in body.items():
        if name in _AS_IT_IS:
            # Python takes 1 and True for equal; JSON does not.
            allowed = _AS_IT_IS[name]
            if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in allowed):
                instead = " or ".join(map(repr, allowed))
                instead = f"leave it out, or write {instead}" if allowed else "leave it out"
                raise CapabilityError(f"`{name}` is not supported, got {str(value)[:200]!r}; {instead}")
        elif name in _LABELS:
            if not isinstance(value, str):
                raise DataError(f"`{name}` must be a text, got {str(value)[:200]!r}")
        elif name not in honoured:
            raise CapabilityError(f"`{name[:100]}` is not supported; leave it out")


def whole(body: Mapping[str, Any], name: str, default: T, *, at_least: int, at_most: int | None = None) -> int | T:
    """A whole number, or the default where the field is missing.

    Raises:
        DataError: it is none, or out of bounds.
    """
    if name not in body:
        return default
    value = body[name]
    if type(value) is not int or value < at_least or (at_most is not None and value > at_most):
        bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise DataError(f"`{name}` must be a whole number {bounds}, got {_short(value)}")
    return value


def number(body: Mapping[str, Any], name: str, default: float, *, at_least: float, at_most: float) -> float:
    """A number, or the default where the field is missing.

    Raises:
        DataError: it is none, or out of bounds.
    """
    if name not in body:
        return default
    value = body[name]
    if type(value) not in (int, float) or not at_least <= value <= at_most or math.isnan(value):
        raise DataError(f"`{name}` must be a number from {at_least:g} to {at_most:g}, got {_short(value)}")
    return float(value)


def switch(body: Mapping[str, Any], name: str) -> bool:
    """True or false; false where the field is missing.

    Raises:
        DataError: it is neither.
    """
    value = body.get(name, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise DataError(f"`{name}` must be true or false, got {_short(value)}")
    return value


def token_ids(value: Any, name: str, vocabulary: int, *, most: int) -> Sequence[int]:
    """A list of token ids.

    Raises:
        DataError: it is none, has more than `most` tokens, or one out of the vocabulary: an engine could die of it.
    """
    if not isinstance(value, list | tuple):
        raise DataError(f"`{name}` must be a list of token ids, got {_short(value)}")
    if len(value) > most:
        raise DataError(f"`{name}` may have {most} tokens, got {len(value)}; shorten it")
    for token in value:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise DataError(f"`{name}` must be token ids from 0 to {vocabulary - 1}, got {_short(token)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
