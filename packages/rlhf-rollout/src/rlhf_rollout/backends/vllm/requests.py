"""From a GenerationRequest to vLLM's sampling parameters, and from vLLM's output to a GenerationResult."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from rlhf_core import (
    BackendCapabilities,
    CapabilityError,
    EngineDiedError,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PackedInts,
    RolloutConfig,
    Sample,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput

_PLACEHOLDERS = ("boi_token_index", "image_token_id")
_LOWEST_TEMPERATURE = 0.01  # vLLM silently raises lower ones to it


def sampling_params(
    request: GenerationRequest, config: RolloutConfig, capabilities: BackendCapabilities
) -> SamplingParams:
    """The request as vLLM's sampling parameters.

    Raises:
        CapabilityError: the request needs what this engine cannot do, or its prompt fills `max_model_len`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    _check(request, config, capabilities)
    sampling = request.sampling
    room = _room(request, config.max_model_len)
    return SamplingParams(
        n=1 if sampling.temperature == 0 else request.n,
        # vLLM reads a seed of -1 as none; the modulus leaves all usual seeds as they are.
        seed=None if request.seed is None else request.seed % 2**62,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids),
        max_tokens=min(sampling.max_tokens, room),
        min_tokens=min(sampling.min_tokens, room),
        structured_outputs=StructuredOutputsParams(json=schema) if (schema := sampling.json_schema) else None,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def engine_prompt(request: GenerationRequest, image_token_id: int | None) -> dict[str, Any]:
    """The prompt as vLLM takes it.

    Args:
        request: with images or without.
        image_token_id: stands for an image in the prompt, if it is known (see `placeholder_of`).

    Raises:
        CapabilityError: the prompt has not one placeholder for each image.
    """
    tokens = list(request.prompt_token_ids)
    if not request.images:
        return {"type": "token", "prompt_token_ids": tokens}
    found = len(request.images) if image_token_id is None else tokens.count(image_token_id)
    if found != len(request.images):
        raise CapabilityError(
            f"request {request.request_id!r}: {len(request.images)} images, but the prompt has the image token "
            f"{image_token_id} {found} times; write it once for each image, as chat templates do: vLLM repeats it"
        )
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": list(request.images)}}


def placeholder_of(model: Any) -> int | None:
    """The token that stands for an image in a prompt for a model of this configuration (Transformers), if it says.

    Where an image has a token of its own for its beginning, chat templates write that one (Gemma 3).
    """
    return next((found for name in _PLACEHOLDERS if (found := getattr(model, name, None)) is not None), None)


def _check(request: GenerationRequest, config: RolloutConfig, capabilities: BackendCapabilities) -> None:
    sampling = request.sampling
    if request.images and not capabilities.images:
        raise CapabilityError(f"request {request.request_id!r}: {config.model} reads no images; send text alone")
    if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
        raise CapabilityError(
            f"request {request.request_id!r}: vLLM samples at no temperature between 0 and "
            f"{_LOWEST_TEMPERATURE}, got {sampling.temperature}; use 0 for greedy decoding"
        )
    if config.device == "cpu" and config.options.get("speculative_config") and sampling.temperature > 0:
        # Its stand-in for the kernel that deals out each request's temperature casts to integers and loses it.
        raise CapabilityError(
            f"request {request.request_id!r}: vLLM's CPU build loses the temperature of draft tokens, so that with "
            "speculative_config only greedy decoding (temperature 0) is right; leave that option out to sample"
        )
    if sampling.json_schema and not capabilities.json_schema:
        raise CapabilityError(
            f"request {request.request_id!r}: to keep samples to a JSON Schema needs a tokenizer, and "
            f"{config.model} has none; leave the schema out"
        )
    if sampling.stop and not capabilities.stop_strings:
        raise CapabilityError(
            f"request {request.request_id!r}: stop strings need a tokenizer, and {config.model} has "
            "none; use stop_token_ids"
        )


def _room(request: GenerationRequest, max_model_len: int) -> int:
    """Tokens that fit behind the prompt."""
    room = max_model_len - len(request.prompt_token_ids)
    if room < 1:
        raise CapabilityError(
            f"request {request.request_id!r}: a prompt of {len(request.prompt_token_ids)} tokens leaves no "
            f"room for a response within max_model_len={max_model_len}; raise that or shorten the prompt"
        )
    return room


def generation_result(request: GenerationRequest, output: RequestOutput) -> GenerationResult:
    """The samples of a finished request.

    Raises:
        EngineDiedError: vLLM ended the request for a reason of its own.
    """
    samples = tuple(_sample(completion) for completion in output.outputs)
    meaning = request.sampling.meaning
    if request.sampling.temperature == 0:
        # Greedy decoding is the same n times, and vLLM truncates nothing for it but stop tokens.
        samples = samples * request.n
        meaning = replace(meaning, top_p=1.0, top_k=0, min_p=0.0)
    prompt = PackedInts.of(output.prompt_token_ids or ()) if request.images else None
    return GenerationResult(
        request_id=request.request_id, samples=samples, meaning=meaning, prompt_token_ids=prompt
    )


def _sample(completion: CompletionOutput) -> Sample:
    flat = cast(Any, completion.logprobs)
    if completion.finish_reason not in ("stop", "length", "abort"):
        raise EngineDiedError(f"vLLM ended a request with finish_reason={completion.finish_reason!r}")
    spans = completion.weight_versions or ()
    return Sample(
        token_ids=completion.token_ids,
        # The sampled token comes first at each position.
        log_probs=np.asarray(flat.logprobs, np.float32)[np.asarray(flat.start_indices, np.int64)] if flat else (),
        weight_versions=np.repeat(
            np.asarray([int(span.version) for span in spans], np.int32),
            np.asarray([span.end - span.start for span in spans], np.int64),
        ),
        finish_reason=cast(FinishReason, completion.finish_reason),
    )
