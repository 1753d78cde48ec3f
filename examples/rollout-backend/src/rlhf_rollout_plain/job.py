"""One request under way: its samples grow together, so all have one length and need no padding."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from rlhf_core import FinishReason, GenerationRequest, GenerationResult, Sample
from torch import Tensor

from rlhf_rollout_plain.decoder import Cache, DecoderShape, Weights, next_token_logits


@dataclass(slots=True)
class Row:
    """One sample under way."""

    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def sample(self) -> Sample:
        """The finished sample; one that was cut off says so."""
        return Sample(
            token_ids=tuple(self.tokens),
            log_probs=tuple(self.log_probs),
            weight_versions=tuple(self.versions),
            finish_reason=self.finish_reason or "abort",
        )


class Job:
    """The rows of one request with their cache."""

    def __init__(self, request: GenerationRequest, *, seed: int, max_model_len: int) -> None:
        self.request = request
        self.future: Future[GenerationResult] = Future()
        self.rows = [Row(torch.Generator().manual_seed(seed + index)) for index in range(request.n)]
        self._running = list(self.rows)
        self._cache: Cache | None = None
        self._room = min(request.sampling.max_tokens, max_model_len - len(request.prompt_token_ids))

    @property
    def over(self) -> bool:
        """True if nothing is left to do: all samples are finished or nobody waits for them."""
        return not self._running or self.future.done()

    def forget_states(self) -> None:
        """Drop the cache, which belongs to old weights."""
        self._cache = None

    def result(self) -> GenerationResult:
        """What there is so far."""
        return GenerationResult(
            request_id=self.request.request_id,
            samples=tuple(row.sample() for row in self.rows),
            meaning=self.request.sampling.meaning,
        )

    def step(self, weights: Weights, shape: DecoderShape, version: int) -> None:
        """Sample one token for each unfinished row."""
        sampling = self.request.sampling
        stops = sorted({*shape.end_of_text, *sampling.stop_token_ids})
        logits = self._logits(weights, shape).float() / sampling.meaning.temperature
        length = len(self._running[0].tokens)
        if length < sampling.min_tokens:
            logits[:, stops] = -torch.inf
        log_probs = logits.log_softmax(dim=-1)
        tokens = [self._draw(row, line) for row, line in zip(self._running, log_probs.cpu(), strict=True)]
        for index, (row, token) in enumerate(zip(self._running, tokens, strict=True)):
            row.tokens.append(token)
            row.log_probs.append(float(log_probs[index, token]))
            row.versions.append(version)
            if token in stops:
                row.finish_reason = "stop"
            elif length + 1 == self._room:
                row.finish_reason = "length"
        self._leave()

    def _draw(self, row: Row, log_probs: Tensor) -> int:
        """A token by the Gumbel-max trick with the row's own noise; the likeliest at temperature 0."""
        if self.request.sampling.temperature > 0:
            noise = torch.empty_like(log_probs).exponential_(generator=row.generator)
            log_probs = log_probs - noise.log()
        return int(log_probs.argmax())

    def _logits(self, weights: Weights, shape: DecoderShape) -> Tensor:
        device = weights["model.embed_tokens.weight"].device
        prompt, started = list(self.request.prompt_token_ids), bool(self._running[0].tokens)
        if self._cache is None:
            self._cache = Cache()
            lines = [prompt + row.tokens for row in self._running] if started else [prompt]
        else:
            lines = [row.tokens[-1:] for row in self._running]
        logits = next_token_logits(weights, shape, torch.tensor(lines, device=device), self._cache)
        if not started:  # the prompt was computed once; each sample gets a copy of its states
            rows = torch.zeros(len(self._running), dtype=torch.long, device=device)
            self._cache, logits = self._cache.select(rows), logits[rows]
        return logits

    def _leave(self) -> None:
        """Finished rows leave the batch."""
        keep = [index for index, row in enumerate(self._running) if row.finish_reason is None]
        if self._cache is not None and 0 < len(keep) < len(self._running):
            self._cache = self._cache.select(torch.tensor(keep, device=self._cache.layers[0][0].device))
        self._running = [self._running[index] for index in keep]
