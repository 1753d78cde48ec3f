"""What OpenAI-compatible clients ask for, checked and turned into sampling settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core import CapabilityError, ConfigError, DataError, SamplingConfig

_NOT_HERE = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
    "response_format": ({"type": "text"}, None),
}
_KINDS: dict[str, tuple[type, ...]] = {
    "n": (int,),
    "seed": (int,),
    "max_tokens": (int,),
    "max_completion_tokens": (int,),
    "min_tokens": (int,),
    "top_k": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "min_p": (int, float),
    "stream": (bool,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSettings:
    """The settings of one request, apart from its prompt."""

    sampling: SamplingConfig
    n: int
    seed: int | None
    stream: bool
    usage_in_stream: bool
    log_probs: bool
    token_names: bool
    """Tokens of log-probs are written as `token_id:<id>` instead of as text."""


def read_settings(body: Mapping[str, Any], *, room: int, fixed: SamplingConfig | None) -> RequestSettings:
    """Sampling settings of a chat or completion request.

    Args:
        body: the parsed JSON.
        room: tokens that fit behind the prompt; the default of `max_tokens`, and its bound.
        fixed: replaces the client's temperature and truncation; the client can only make the answer shorter and add
            stops.

    Raises:
        DataError: a field of the wrong type or value.
        CapabilityError: a feature that rollout backends do not have.
    """
    for name, defaults in _NOT_HERE.items():
        if name in body and body[name] not in defaults:
            raise CapabilityError(f"`{name}` is not supported, got {body[name]!r}; leave it out")
    for name, kinds in _KINDS.items():
        value = body.get(name)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise DataError(f"`{name}` must be a {kinds[-1].__name__}, got {value!r}")
    if room < 1:
        raise CapabilityError("the prompt fills the model's context; shorten the conversation")
    try:
        sampling = _sampling(body, room, fixed)
    except ConfigError as error:
        raise DataError(str(error)) from None
    n = body.get("n") or 1
    if not 1 <= n <= 1024:
        raise DataError(f"`n` must lie in [1, 1024], got {n}")
    options = body.get("stream_options") or {}
    return RequestSettings(
        sampling=sampling,
        n=n,
        seed=body.get("seed"),
        stream=bool(body.get("stream")),
        usage_in_stream=isinstance(options, Mapping) and bool(options.get("include_usage")),
        # Chat has a boolean, completions a number of which 0 is one.
        log_probs=body.get("logprobs") not in (None, False),
        token_names=bool(body.get("return_tokens_as_token_ids")),
    )


def _sampling(body: Mapping[str, Any], room: int, fixed: SamplingConfig | None) -> SamplingConfig:
    asked = {name: body[name] for name in ("temperature", "top_p", "min_p") if body.get(name) is not None}
    # -1 is how vLLM's clients switch it off.
    asked["top_k"] = max(0, body.get("top_k") or 0)
    longest = body.get("max_completion_tokens") or body.get("max_tokens") or room
    stop = body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise DataError(f"`stop` must be a string or a list of strings, got {stop!r}")
    stop_ids = body.get("stop_token_ids") or ()
    if not all(type(token) is int for token in stop_ids):
        raise DataError(f"`stop_token_ids` must be a list of numbers, got {stop_ids!r}")
    if fixed is not None:
        longest = min(longest, room, fixed.max_tokens)
        return replace(
            fixed,
            max_tokens=longest,
            min_tokens=min(fixed.min_tokens, longest),
            stop=tuple(dict.fromkeys((*fixed.stop, *stops))),
            stop_token_ids=tuple(dict.fromkeys((*fixed.stop_token_ids, *stop_ids))),
        )
    longest = min(longest, room)
    return SamplingConfig(
        max_tokens=longest,
        min_tokens=min(body.get("min_tokens") or 0, longest),
        stop=stops,
        stop_token_ids=tuple(stop_ids),
        **asked,
    )


def read_prompt(body: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a completion request's prompt: text, or token ids, which are taken as they are.

    Raises:
        DataError: `prompt` is neither text nor token ids, holds several prompts, or is empty.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        prompt = tokenizer(prompt, add_special_tokens=True)["input_ids"]
    if not isinstance(prompt, list) or not prompt or not all(map(_is_token, prompt)):
        raise DataError(
            "`prompt` must be one text or one list of token ids, and not empty; send a request per prompt"
        )
    return tuple(prompt)


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31
