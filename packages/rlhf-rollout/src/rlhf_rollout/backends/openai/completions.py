"""Requests to an OpenAI-compatible completions API, its answers, and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlhf_core import (
    CapabilityError,
    DeadlineExceeded,
    EngineDiedError,
    FinishReason,
    GenerationRequest,
    RLHFError,
    Sample,
)


def completion_arguments(request: GenerationRequest, *, model: str, max_model_len: int) -> dict[str, Any]:
    """The fields of a request; those that equal a server's defaults are left out, so that plain servers accept it.

    Raises:
        CapabilityError: the prompt fills `max_model_len`.
    """
    sampling, limit = request.sampling, max_model_len
    room = limit - len(request.prompt_token_ids)
    if room < 1:
        raise CapabilityError(
            f"request {request.request_id!r}: a prompt of {len(request.prompt_token_ids)} tokens leaves no "
            f"room for a response within max_model_len={limit}; raise that or shorten the prompt"
        )
    if sampling.json_schema:
        raise CapabilityError(
            f"request {request.request_id!r}: the openai backend keeps samples to no JSON Schema; leave it out"
        )
    further = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": min(sampling.min_tokens, room),
        "stop_token_ids": list(sampling.stop_token_ids),
        # No penalty is 1, which is left out as what is 0 is.
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else 0,
    }
    penalties = {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    return {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "n": 1 if sampling.temperature == 0 else request.n,
        "max_tokens": min(sampling.max_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": 1,
        "extra_body": {
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **{name: value for name, value in further.items() if value},
        },
        **{name: value for name, value in penalties.items() if value},
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
        **({"seed": request.seed} if request.seed is not None else {}),
    }


def completion_sample(choice: Mapping[str, Any], request_id: str) -> Sample:
    """One choice of a server's answer.

    Raises:
        CapabilityError: the choice lacks token ids or log-probs.
        EngineDiedError: the server ended the choice for a reason of its own.
    """
    log_probs = choice.get("logprobs") or {}
    names = log_probs.get("tokens") or []
    tokens = choice.get("token_ids")
    if tokens is None and all(str(name).startswith("token_id:") for name in names):
        tokens = [int(name.removeprefix("token_id:")) for name in names]
    values = log_probs.get("token_logprobs") or []
    if tokens is None or len(values) != len(tokens) or None in values:
        found = "no token ids" if tokens is None else f"{len(tokens)} token ids and {len(values)} log-probs"
        raise CapabilityError(
            f"request {request_id!r}: the server's answer has {found}; it must return a log-prob for every token "
            "and its id (`return_token_ids` or `return_tokens_as_token_ids`, as vLLM's server does)"
        )
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length", "abort"):
        raise EngineDiedError(f"request {request_id!r}: the server ended it with finish_reason={reason!r}")
    return Sample(
        token_ids=tokens,
        log_probs=values,
        weight_versions=choice.get("weight_versions") or (0,) * len(tokens),
        finish_reason=cast(FinishReason, reason),
    )


def translated(error: Any, what: str) -> RLHFError:
    """The error of the OpenAI client as an RLHFError."""
    import openai

    message = f"{what}: {reason(error)}"
    if isinstance(error, openai.APITimeoutError):
        return DeadlineExceeded(f"{message}; raise rollout.options.timeout_s or ask for fewer tokens at once")
    if isinstance(error, openai.APIStatusError) and 400 <= error.status_code < 500:
        return CapabilityError(message)
    return EngineDiedError(message)


def reason(error: Exception) -> str:
    """The error's message with that of its cause: the client itself only says `Connection error.`"""
    return f"{error} ({error.__cause__})" if error.__cause__ else str(error)
