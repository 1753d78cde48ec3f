"""What OpenAI-compatible clients ask for, checked and turned into sampling settings.

Every field of a request is honoured or refused by name; nothing is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhf_core import CapabilityError, DataError, SamplingConfig

from rlhf_rollout.gateway.apis.fields import (
    MOST_CHOICES,
    check_fields,
    number,
    switch,
    token_ids,
    whole,
)
from rlhf_rollout.gateway.apis.structured import schema_of

Kind = Literal["chat.completion", "text_completion"]


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


def read_settings(
    body: Mapping[str, Any], *, kind: Kind, room: int, vocabulary: int, fixed: SamplingConfig | None
) -> RequestSettings:
    """Sampling settings of a chat or completion request.

    Args:
        body: the parsed JSON, without fields that are null.
        kind: which endpoint's fields are known.
        room: tokens that fit behind the prompt; the default of `max_tokens`, and its bound.
        vocabulary: token ids lie below it.
        fixed: replaces the client's temperature and truncation; the client can only make the answer shorter, add
            stops, and ask for JSON.

    Raises:
        DataError: a field of the wrong type or value.
        CapabilityError: a feature that is not here, or no room.
    """
    check_fields(body, chat=kind == "chat.completion")
    sampling = _sampling(body, vocabulary)
    if room < 1:
        # The name by which OpenAI's clients and agent frameworks know it.
        raise CapabilityError(
            "the prompt fills the model's context (context_length_exceeded); shorten the conversation"
        )
    if fixed is not None:
        stops = tuple(dict.fromkeys((*fixed.stop, *sampling.stop)))
        ids = tuple(dict.fromkeys((*fixed.stop_token_ids, *sampling.stop_token_ids)))
        longest = min(sampling.max_tokens, fixed.max_tokens)
        sampling = replace(
            fixed,
            stop=stops,
            stop_token_ids=ids,
            max_tokens=longest,
            min_tokens=min(fixed.min_tokens, longest),
            json_schema=sampling.json_schema or fixed.json_schema,
        )
    options = body.get("stream_options", {})
    if not isinstance(options, Mapping) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise DataError(f"`stream_options` may have `include_usage`, got {str(options)[:200]!r}")
    if options.get("include_obfuscation"):
        raise CapabilityError("`stream_options.include_obfuscation` is not supported; leave it out")
    return RequestSettings(
        sampling=shortened(sampling, room),
        n=whole(body, "n", 1, at_least=1, at_most=MOST_CHOICES),
        seed=whole(body, "seed", None, at_least=0, at_most=(1 << 63) - 1 - MOST_CHOICES),
        stream=switch(body, "stream"),
        usage_in_stream=switch(options, "include_usage"),
        log_probs=_log_probs(body, kind),
        token_names=switch(body, "return_tokens_as_token_ids"),
    )


def shortened(sampling: SamplingConfig, tokens: int | None) -> SamplingConfig:
    """The settings with answers of at most `tokens` tokens; None leaves them as they are."""
    if tokens is None or tokens >= sampling.max_tokens:
        return sampling
    return replace(sampling, max_tokens=tokens, min_tokens=min(sampling.min_tokens, tokens))


def _sampling(body: Mapping[str, Any], vocabulary: int) -> SamplingConfig:
    most = 1 << 31
    longest = whole(body, "max_tokens", most, at_least=1)
    longest = min(whole(body, "max_completion_tokens", longest, at_least=1), most)
    least = whole(body, "min_tokens", 0, at_least=0)
    if least > longest:
        raise DataError(f"`min_tokens` must be at most max_tokens={longest}, got {least}")
    temperature = number(body, "temperature", 1.0, at_least=0.0, at_most=100.0)
    if 0 < temperature < 0.01:
        # Engines clamp it, and log-probs would mean something else than what is recorded; logits / 1e-40 are NaN.
        raise DataError(f"`temperature` must be 0 (greedy) or at least 0.01, got {temperature}")
    return SamplingConfig(
        max_tokens=longest,
        min_tokens=least,
        temperature=temperature,
        top_p=number(body, "top_p", 1.0, at_least=1e-6, at_most=1.0),
        # -1 is how vLLM's clients switch it off.
        top_k=max(0, whole(body, "top_k", 0, at_least=-1, at_most=most - 1)),
        min_p=number(body, "min_p", 0.0, at_least=0.0, at_most=0.999999),
        repetition_penalty=number(body, "repetition_penalty", 1.0, at_least=0.01, at_most=100.0),
        presence_penalty=number(body, "presence_penalty", 0.0, at_least=-2.0, at_most=2.0),
        frequency_penalty=number(body, "frequency_penalty", 0.0, at_least=-2.0, at_most=2.0),
        json_schema=schema_of(body),
        stop=_stops(body),
        stop_token_ids=tuple(token_ids(body.get("stop_token_ids", []), "stop_token_ids", vocabulary, most=1024)),
    )


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > 64
        or not all(isinstance(text, str) and 0 < len(text) <= 1024 for text in stops)
    ):
        raise DataError(
            f"`stop` must be a string or a list of at most 64 strings of 1 to 1024 characters, "
            f"got {str(stop)[:200]!r}"
        )
    return tuple(stops)


def _log_probs(body: Mapping[str, Any], kind: Kind) -> bool:
    if kind == "chat.completion":
        return switch(body, "logprobs")
    # Completions have a number of alternatives, the sampled token among them; there is no other here.
    return whole(body, "logprobs", None, at_least=0, at_most=1) is not None


def read_prompt(
    body: Mapping[str, Any], tokenise: Callable[[str], Sequence[int]], *, vocabulary: int, most: int
) -> Sequence[int]:
    """Token ids of a completion request's prompt: text, or token ids, which are taken as they are.

    Raises:
        DataError: `prompt` is neither text nor token ids of the vocabulary, holds several prompts, or is empty.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        prompt = tokenise(prompt)
    if not isinstance(prompt, list | tuple) or not prompt or isinstance(prompt[0], str | list):
        raise DataError(
            "`prompt` must be one text or one list of token ids, and not empty; send a request per prompt"
        )
    return token_ids(prompt, "prompt", vocabulary, most=most)
