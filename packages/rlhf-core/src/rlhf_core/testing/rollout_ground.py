"""What the checks of a rollout backend stand on: fixtures, requests, and comparisons with a forward pass."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch

from rlhf_core.data.generation import GenerationRequest, GenerationResult, Sample
from rlhf_core.data.packed import IntsLike, PackedInts
from rlhf_core.data.sampling import SamplingConfig
from rlhf_core.interfaces.rollout import PauseMode, RolloutBackend, RolloutConfig
from rlhf_core.testing.tiny import SPECIAL_TOKENS, save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, sync

EOS = SPECIAL_TOKENS.index("<|im_end|>")
Results = list[GenerationResult]


class RolloutGround:
    """Class attributes adapt the checks to slow or coarse backends."""

    tied: ClassVar[bool] = True
    """Whether the model's input and output embeddings are tied."""
    vocab_size: ClassVar[int] = 512
    max_model_len: ClassVar[int] = 512
    long_tokens: ClassVar[int] = 192
    """Length of the requests that are interrupted; raise it if the backend finishes them too fast."""
    tolerance: ClassVar[float] = 1e-4
    """Largest difference allowed between a log-prob and that of the reference forward pass."""
    timeout_s: ClassVar[float] = 120.0
    """Deadline of each check."""

    # ------------------------------------------------------------ fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls) -> Callable[[RolloutConfig], RolloutBackend]:
        """Override: return the backend's class, or a function from its config to a ready backend."""
        raise TypeError(f"{cls.__name__} must override the fixture backend_factory")

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        """A tiny random Qwen2 with tokenizer."""
        path = tmp_path_factory.mktemp("rollout-model")
        return save_tiny_model(path, tied=cls.tied, vocab_size=cls.vocab_size)

    @pytest.fixture(scope="class")
    @classmethod
    def rollout_config(cls, model_path: str) -> RolloutConfig:
        """Override to add `options`."""
        return RolloutConfig(model=model_path, max_model_len=cls.max_model_len, max_num_seqs=32)

    @pytest.fixture(scope="class")
    @classmethod
    def trainer(cls, model_path: str) -> Trainer:
        """The model that the backend agrees with at the start and at the end of every check."""
        return Trainer(model_path)

    @pytest.fixture(scope="class")
    @classmethod
    def backend(
        cls, backend_factory: Callable[[RolloutConfig], RolloutBackend], rollout_config: RolloutConfig
    ) -> Iterator[RolloutBackend]:
        """One backend for all checks; at the end it is closed twice."""
        backend = backend_factory(rollout_config)
        assert backend.weight_version == 0, "the weights that are loaded at the start have version 0"
        yield backend
        backend.close()
        backend.close()

    # ------------------------------------------------------------ tools of the checks

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run in a fresh event loop with the deadline: each call is another loop, as in a program."""

        async def with_deadline() -> Any:
            return await asyncio.wait_for(coroutine, self.timeout_s)

        return asyncio.run(with_deadline())

    def generate(self, backend: RolloutBackend, request: GenerationRequest) -> GenerationResult:
        """One request in an event loop of its own."""
        return self.run(backend.generate(request))

    def prompt(self, index: int, *, length: int = 6) -> tuple[int, ...]:
        """A random prompt, another one for each index."""
        generator = torch.Generator().manual_seed(index)
        return tuple(torch.randint(5, self.vocab_size, (length,), generator=generator).tolist())

    def request(
        self,
        request_id: str = "request",
        *,
        prompt: IntsLike | None = None,
        sampling: SamplingConfig | None = None,
        n: int = 1,
        seed: int | None = 0,
    ) -> GenerationRequest:
        """A request with defaults."""
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=self.prompt(0) if prompt is None else prompt,
            sampling=sampling or SamplingConfig(max_tokens=16),
            n=n,
            seed=seed,
        )

    def long_requests(self) -> list[GenerationRequest]:
        """Requests that run to exactly `long_tokens`, for interruptions."""
        sampling = SamplingConfig(max_tokens=self.long_tokens, min_tokens=self.long_tokens)
        return [
            self.request(f"long-{i}", prompt=self.prompt(i), sampling=sampling, n=1 + i % 2, seed=10 * i)
            for i in range(4)
        ]

    def interrupted(
        self, backend: RolloutBackend, mode: PauseMode, caught: Callable[[Results], bool]
    ) -> tuple[Results, Results]:
        """Results of the long requests uninterrupted and with a pause amid them."""
        requests = self.long_requests()

        async def pause_amid(delay: float) -> tuple[int, Results]:
            tasks = [asyncio.create_task(backend.generate(request)) for request in requests]
            await asyncio.sleep(delay)
            await backend.pause(mode)
            if mode == "keep":
                await asyncio.sleep(0.1)
            running = sum(not task.done() for task in tasks)
            if mode == "keep":
                await backend.resume()
            results = await asyncio.gather(*tasks)
            await backend.resume()
            return running, results

        started = time.monotonic()
        whole = self.run(generate_all(backend, requests))
        delay = (time.monotonic() - started) / 3
        for _ in range(8):
            running, results = self.run(pause_amid(delay))
            if (running or mode == "abort") and caught(results):
                return whole, results
            delay *= 0.7
        pytest.fail(f"no request was caught running by 8 pauses; raise long_tokens ({self.long_tokens})")

    async def sync_amid(self, backend: RolloutBackend, trainer: Trainer) -> Results:
        """Results of the long requests, during which a sync takes place."""
        tasks = [asyncio.create_task(backend.generate(request)) for request in self.long_requests()]
        await asyncio.sleep(0.05)
        await sync(backend, trainer)
        return await asyncio.gather(*tasks)

    def need_pause_mode(self, backend: RolloutBackend, mode: PauseMode) -> None:
        """Skip the check if the backend does not list the mode."""
        if mode not in backend.capabilities.pause_modes:
            pytest.skip(f"the backend does not list the pause mode {mode}")

    def check_sample(self, sample: Sample, request: GenerationRequest, version: int) -> None:
        """Lengths, finish reason, versions and range of one sample."""
        assert isinstance(sample, Sample)
        assert 1 <= sample.length <= request.sampling.max_tokens
        assert len(sample.log_probs) == len(sample.weight_versions) == sample.length
        assert set(sample.weight_versions) == {version}
        assert all(math.isfinite(log_prob) and log_prob <= 1e-6 for log_prob in sample.log_probs)
        assert all(type(token) is int and 0 <= token < self.vocab_size for token in sample.token_ids)
        if sample.finish_reason == "stop":
            assert sample.token_ids[-1] in {EOS, *request.sampling.stop_token_ids}
        else:
            assert (sample.finish_reason, sample.length) == ("length", request.sampling.max_tokens)

    def log_prob_gap(self, trainer: Trainer, request: GenerationRequest, sample: Sample) -> float:
        """Largest difference between the sample's log-probs and the trainer's."""
        return float((trainer.log_probs(request, sample) - torch.tensor(sample.log_probs)).abs().max())

    def check_log_probs(self, trainer: Trainer, request: GenerationRequest, sample: Sample) -> None:
        """The sample's log-probs are those of the trainer's model."""
        gap = self.log_prob_gap(trainer, request, sample)
        assert gap < self.tolerance, f"log-probs differ by {gap:.2e} from a forward pass of the same tokens"


async def generate_all(backend: RolloutBackend, requests: Sequence[GenerationRequest]) -> Results:
    """All requests at once."""
    return list(await asyncio.gather(*(backend.generate(request) for request in requests)))


def token_ids(results: Results) -> list[PackedInts]:
    """The tokens of all samples of all results."""
    return [sample.token_ids for result in results for sample in result.samples]


def penalised_logits(trainer: Trainer, request: GenerationRequest, sample: Sample) -> torch.Tensor:
    """Logits before each sampled token, after the request's penalties. [tokens, vocab]"""
    sampling, prompt = request.sampling, list(request.prompt_token_ids)
    logits = trainer.logits(request.prompt_token_ids + sample.token_ids)[len(prompt) - 1 : -1]
    for position, row in enumerate(logits):
        before = list(sample.token_ids[:position])
        for token in {*prompt, *before}:
            row[token] *= sampling.repetition_penalty ** (-1 if row[token] > 0 else 1)
        for token in before:
            row[token] -= sampling.frequency_penalty
        for token in set(before):
            row[token] -= sampling.presence_penalty
    return logits


def processed_log_probs(trainer: Trainer, request: GenerationRequest, sample: Sample) -> torch.Tensor:
    """Log-probs of the distribution after penalties and truncation; -inf outside the candidate set. [tokens]"""
    sampling = request.sampling
    logits = penalised_logits(trainer, request, sample)
    probs = (logits / sampling.meaning.temperature).softmax(dim=-1)
    ordered, order = probs.sort(dim=-1, descending=True)
    ordered = ordered.where(ordered >= sampling.min_p * ordered[:, :1], 0.0)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = 0.0
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    # A token stays if the mass before it has not reached top_p: the smallest set that reaches it.
    keep = ordered.cumsum(dim=-1) - ordered < sampling.top_p
    kept = torch.zeros_like(probs).scatter(-1, order, ordered.where(keep, 0.0))
    targets = torch.tensor(sample.token_ids).unsqueeze(-1)
    return (kept / kept.sum(dim=-1, keepdim=True)).log().gather(-1, targets).squeeze(-1)
