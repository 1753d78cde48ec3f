"""Samples that a pause cut off, continued from the tokens that they have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from rlhf_core import GenerationRequest, GenerationResult, Sample
from rlhf_rollout import gather_or_cancel

from rlhf_launch.seeds import request_seed

Generate = Callable[[GenerationRequest], Awaitable[GenerationResult]]


async def generate_to_the_end(generate: Generate, request: GenerationRequest) -> GenerationResult:
    """The samples of a request, each continued as often as it comes back with `finish_reason="abort"`.

    Engines that cannot let running requests stand still give them up in a pause. What they had sampled keeps its
    log-probs and weight versions; the rest is sampled behind it, under the weights of then. A stop string that
    falls on the seam is not seen.
    """
    result = await generate(request)
    samples = list(result.samples)
    while unfinished := [index for index, sample in enumerate(samples) if sample.finish_reason == "abort"]:
        rests = [_rest(request, index, samples[index]) for index in unfinished]
        parts = await gather_or_cancel(_run(generate, rest) for rest in rests)
        for index, part in zip(unfinished, parts, strict=True):
            samples[index] = _join(samples[index], part.samples[0])
    return replace(result, samples=tuple(samples))


async def _run(generate: Generate, request: GenerationRequest) -> GenerationResult:
    return await generate(request)


def _rest(request: GenerationRequest, index: int, sample: Sample) -> GenerationRequest:
    """A request for what is missing of one sample. With the first seed it would draw the first tokens again."""
    name = f"{request.request_id}+{index}.{sample.length}"
    return replace(
        request,
        request_id=name,
        prompt_token_ids=request.prompt_token_ids + sample.token_ids,
        sampling=replace(
            request.sampling,
            max_tokens=request.sampling.max_tokens - sample.length,
            min_tokens=max(0, request.sampling.min_tokens - sample.length),
        ),
        n=1,
        seed=None if request.seed is None else request_seed(request.seed, name),
    )


def _join(first: Sample, rest: Sample) -> Sample:
    return Sample(
        token_ids=first.token_ids + rest.token_ids,
        log_probs=first.log_probs + rest.log_probs,
        weight_versions=first.weight_versions + rest.weight_versions,
        finish_reason=rest.finish_reason,
    )
