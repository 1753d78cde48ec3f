"""Answers in pieces while they are being sampled."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rlhf_core import (
    CapabilityError,
    EngineDiedError,
    GenerationRequest,
    GenerationResult,
    PackedFloats,
    PackedInts,
    RLHFError,
    Sample,
)

from rlhf_rollout.gateway.apis.answers import Answer, TextPieces
from rlhf_rollout.gateway.apis.chat_form import ChatForm
from rlhf_rollout.gateway.session_turns import TurnUnderWay
from rlhf_rollout.gateway.sessions import TurnPrompt
from rlhf_rollout.generator import Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRequest:
    """A client's request: what is generated for it, and how it is answered."""

    answer: Answer
    generation: GenerationRequest
    prompt: TurnPrompt
    turn: TurnUnderWay | None = None
    """The turn of the session that records the answer, if one does."""
    form: ChatForm | None = None
    """The conversation; None for a completion."""

    def through(self, backend: Generator) -> Generator:
        """The backend for this request: it ends with the session, and its failures are named."""
        return _CheckedGenerator(backend, self)


@dataclass(frozen=True, slots=True)
class _CheckedGenerator:
    """A backend whose requests end with the session, if there is one, and whose failures are named."""

    backend: Generator
    asked: ClientRequest

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        try:
            work = self.backend.generate(request)
            turn = self.asked.turn
            result = await (work if turn is None else turn.sample(work))
        except RLHFError:
            raise
        except Exception as error:
            raise EngineDiedError(f"the backend failed: {type(error).__name__}: {error}") from error
        for sample in result.samples:
            if not np.isfinite(np.asarray(sample.log_probs)).all():
                raise EngineDiedError(
                    "the backend returned a log-prob that is not finite; nothing is recorded of it"
                )
        if request.images and result.prompt_token_ids != (ours := self.asked.prompt.token_ids):
            ran = "it does not say which" if (it := result.prompt_token_ids) is None else f"{len(it)} there"
            raise CapabilityError(
                f"the backend ran the images as other tokens than a trainer would ({ran}, {len(ours)} here); both "
                "must use the processor of the checkpoint: leave out rollout.options such as mm_processor_kwargs"
            )
        return result


async def stream_chunks(
    backend: Generator,
    work: ClientRequest,
    tell: Callable[[Sample, GenerationResult], Awaitable[Mapping[str, Any]]],
    *,
    slice_tokens: int,
) -> AsyncIterator[Mapping[str, Any]]:
    """The chunks of a chat or completion answer.

    `tell` records a complete sample, and makes it a message of a chat.
    """
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
        message = await tell(sample, result)
        if message.get("reasoning_content"):
            yield answer.thought(index, message)
        text = (message.get("content") or "") if chat else answer.text(sample)
        if rest := pieces.finish(text) if sliced else text:
            yield answer.delta(index, rest, None if sliced else sample)
        if message.get("tool_calls"):
            yield answer.calls(index, message)
        yield answer.end(index, sample, message)
    if answer.asked.usage_in_stream:
        yield answer.usage(result.samples)


def _can_be_sliced(work: ClientRequest) -> bool:
    """Whether to sample in slices: stops, thoughts and calls may span them; seeds and penalties differ.

    An engine would make each slice's images anew.
    """
    sampling, generation = work.generation.sampling, work.generation
    return (
        generation.n == 1
        and not generation.images
        and generation.seed is None
        and work.answer.thinking is None
        and not sampling.counts_sampled
        and not (sampling.stop or sampling.stop_token_ids or (work.form is not None and work.form.tools))
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
