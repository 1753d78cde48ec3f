"""Answers in pieces while they are being sampled."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core import GenerationRequest, GenerationResult, PackedFloats, PackedInts, Sample

from rlhf_rollout.gateway.answers import Answer, TextPieces
from rlhf_rollout.gateway.sessions import RecordedSession, TurnPrompt
from rlhf_rollout.generator import Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRequest:
    """A client's request: what is generated for it, and how it is answered."""

    answer: Answer
    generation: GenerationRequest
    session: RecordedSession | None = None
    prompt: TurnPrompt | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] = ()


async def stream_chunks(
    backend: Generator,
    work: ClientRequest,
    tell: Callable[[Sample, GenerationResult], Mapping[str, Any]],
    *,
    slice_tokens: int,
) -> AsyncIterator[Mapping[str, Any]]:
    """The chunks of a chat or completion answer. `tell` makes a complete sample a message, and records it."""
    answer, chat = work.answer, work.answer.kind == "chat.completion"
    parts: list[GenerationResult] = []
    pieces = TextPieces(lambda tokens: answer.tokenizer.decode(tokens, skip_special_tokens=True))
    sliced = slice_tokens if _can_be_sliced(work) else 0
    if sliced:
        async for part in sample_in_slices(backend, work.generation, sliced):
            (sample,) = part.samples
            yield answer.delta(0, pieces.add(sample.token_ids), sample, first=not parts)
            parts.append(part)
        # Each slice has its own share of `min_tokens`.
        meaning = replace(parts[0].meaning, min_tokens=work.generation.sampling.min_tokens)
        result = replace(parts[0], samples=(joined([part.samples[0] for part in parts]),), meaning=meaning)
    else:
        for index in range(work.generation.n if chat else 0):
            yield answer.delta(index, "", None, first=True)
        result = await backend.generate(work.generation)
    for index, sample in enumerate(result.samples):
        message = tell(sample, result) if chat else {}
        text = (message.get("content") or "") if chat else answer.text(sample)
        if rest := pieces.finish(text) if sliced else text:
            yield answer.delta(index, rest, None if sliced else sample)
        if message.get("tool_calls"):
            yield answer.calls(index, message)
        yield answer.end(index, sample, message)
    if answer.asked.usage_in_stream:
        yield answer.usage(result.samples)


def _can_be_sliced(work: ClientRequest) -> bool:
    """Whether to sample in slices: stops and tool calls may span them, and a seed gives other tokens in slices."""
    sampling, generation = work.generation.sampling, work.generation
    return (
        generation.n == 1
        and generation.seed is None
        and not (sampling.stop or sampling.stop_token_ids or work.tools)
    )


async def sample_in_slices(
    backend: Generator, request: GenerationRequest, size: int
) -> AsyncIterator[GenerationResult]:
    """One sample in parts of `size` tokens, each a request that continues the last (cheap with a prefix cache)."""
    sampling, done = request.sampling, 0
    for number in itertools.count():
        most = min(size, sampling.max_tokens - done)
        least = min(most, max(0, sampling.min_tokens - done))
        part = await backend.generate(
            replace(
                request,
                request_id=f"{request.request_id}/{number}",
                sampling=replace(sampling, max_tokens=most, min_tokens=least),
            )
        )
        (sample,) = part.samples
        done += sample.length
        yield part
        if sample.finish_reason != "length" or sample.length < most or done >= sampling.max_tokens:
            return
        request = replace(request, prompt_token_ids=request.prompt_token_ids + sample.token_ids)


def joined(parts: Sequence[Sample]) -> Sample:
    """Consecutive parts of a sample as one."""
    return Sample(
        token_ids=PackedInts.joined([part.token_ids for part in parts]),
        log_probs=PackedFloats.joined([part.log_probs for part in parts]),
        weight_versions=PackedInts.joined([part.weight_versions for part in parts]),
        finish_reason=parts[-1].finish_reason,
    )
