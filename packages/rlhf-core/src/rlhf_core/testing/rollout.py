"""Conformance kit for rollout backends: subclass, give a factory, run pytest.

    from rlhf_core.testing.rollout import RolloutBackendConformance

    class TestMyBackend(RolloutBackendConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def backend_factory(cls):
            return MyBackend

One backend is started for the class and closed after it. Log-probs are compared with a plain forward pass of the
same model by Transformers, so a backend that samples from other weights than it claims cannot pass.
"""
# ruff: noqa: D102 - the name of each check is its sentence

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from rlhf_core.backends import BackendCapabilities, PauseMode, RolloutBackend, RolloutConfig
from rlhf_core.errors import CapabilityError, StaleWeightsError, WeightSyncError
from rlhf_core.generation import GenerationRequest, GenerationResult, Sample
from rlhf_core.sampling import SamplingConfig
from rlhf_core.testing.tiny import SPECIAL_TOKENS, save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, broken_sync, connect, cpu_transport, send_and_receive, sync

EOS = SPECIAL_TOKENS.index("<|im_end|>")
Results = list[GenerationResult]


class RolloutBackendConformance:
    """What every rollout backend must do. Class attributes adapt the kit to slow or coarse backends."""

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

    # ------------------------------------------------------------ what it says of itself

    def test_it_is_a_rollout_backend(self, backend: RolloutBackend) -> None:
        assert isinstance(backend, RolloutBackend)

    def test_capabilities_are_sane(self, backend: RolloutBackend) -> None:
        capabilities = backend.capabilities
        assert isinstance(capabilities, BackendCapabilities)
        assert capabilities.transports, "a backend without a weight transport cannot be trained"
        assert capabilities.transports <= {"local", "gloo", "nccl"}
        assert capabilities.receivers >= 1
        assert capabilities.pause_modes <= {"keep", "abort"}

    # ------------------------------------------------------------ shape of the answer

    @pytest.mark.parametrize("n", [1, 5])
    def test_every_request_gets_n_samples(self, backend: RolloutBackend, n: int) -> None:
        request = self.request(n=n, sampling=SamplingConfig(max_tokens=9, temperature=0.7))
        result = self.generate(backend, request)
        assert result.request_id == request.request_id
        assert result.meaning == request.sampling.meaning
        assert len(result.samples) == n
        for sample in result.samples:
            self.check_sample(sample, request, backend.weight_version)

    def test_max_tokens_of_one(self, backend: RolloutBackend) -> None:
        result = self.generate(backend, self.request(n=3, sampling=SamplingConfig(max_tokens=1)))
        assert [sample.length for sample in result.samples] == [1, 1, 1]

    def test_min_tokens_holds_back_end_of_text_and_stop_tokens(self, backend: RolloutBackend) -> None:
        sampling = SamplingConfig(max_tokens=12, min_tokens=6, stop_token_ids=tuple(range(100, 400)))
        for sample in self.generate(backend, self.request(n=8, sampling=sampling)).samples:
            assert sample.length >= 6
            assert not {EOS, *sampling.stop_token_ids} & set(sample.token_ids[:6][:-1])

    def test_end_of_text_ends_a_sample_and_stays_in_it(self, backend: RolloutBackend, trainer: Trainer) -> None:
        prompt = trainer.prompt_continued_by(EOS, vocab_size=self.vocab_size)
        sampling = SamplingConfig(max_tokens=8, temperature=0.0)
        request = self.request(prompt=prompt, sampling=sampling)
        (sample,) = self.generate(backend, request).samples
        assert sample.token_ids == (EOS,)
        assert sample.finish_reason == "stop"
        self.check_log_probs(trainer, request, sample)
        held_back = replace(request, sampling=replace(sampling, min_tokens=4))
        (sample,) = self.generate(backend, held_back).samples
        assert sample.length >= 4
        assert sample.token_ids[0] != EOS

    def test_stop_token_ids_end_a_sample_and_stay_in_it(self, backend: RolloutBackend) -> None:
        stops = tuple(range(0, self.vocab_size, 3))
        request = self.request(n=6, sampling=SamplingConfig(max_tokens=100, stop_token_ids=stops))
        for sample in self.generate(backend, request).samples:
            assert sample.finish_reason == "stop"
            assert sample.token_ids[-1] in {*stops, EOS}
            assert not set(sample.token_ids[:-1]) & {*stops, EOS}

    def test_a_full_context_ends_a_sample(self, backend: RolloutBackend) -> None:
        prompt = self.prompt(0, length=self.max_model_len - 3)
        request = self.request(prompt=prompt, sampling=SamplingConfig(max_tokens=9, temperature=0.0))
        (sample,) = self.generate(backend, request).samples
        assert sample.finish_reason == "stop" or (sample.length, sample.finish_reason) == (3, "length")

    # ------------------------------------------------------------ refusals

    def test_a_prompt_that_fills_the_context_is_refused(self, backend: RolloutBackend) -> None:
        request = self.request(prompt=self.prompt(0, length=self.max_model_len))
        with pytest.raises(CapabilityError):
            self.generate(backend, request)

    def test_stop_strings_end_a_sample_or_are_refused(self, backend: RolloutBackend, model_path: str) -> None:
        from transformers import AutoTokenizer

        request = self.request(sampling=SamplingConfig(max_tokens=48), seed=3)
        if not backend.capabilities.stop_strings:
            with pytest.raises(CapabilityError):
                self.generate(backend, replace(request, sampling=SamplingConfig(max_tokens=48, stop=("a",))))
            return
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        (free,) = self.generate(backend, request).samples
        texts = [tokenizer.decode([token]) for token in free.token_ids]
        end = next(
            i for i, text in enumerate(texts) if i > 2 and len(text) == 1 and text.isascii() and text.strip()
        )
        sampling = SamplingConfig(max_tokens=48, stop=(texts[end],))
        (stopped,) = self.generate(backend, replace(request, sampling=sampling)).samples
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == free.token_ids[: texts.index(texts[end]) + 1]

    @pytest.mark.parametrize("truncation", [{"top_p": 0.6}, {"top_k": 7}, {"min_p": 0.3}], ids=str)
    def test_truncated_sampling_renormalises_or_is_refused(
        self, backend: RolloutBackend, trainer: Trainer, truncation: dict[str, Any]
    ) -> None:
        request = self.request(n=2, sampling=SamplingConfig(max_tokens=12, temperature=0.8, **truncation))
        if not backend.capabilities.truncated_sampling:
            with pytest.raises(CapabilityError):
                self.generate(backend, request)
            return
        for sample in self.generate(backend, request).samples:
            expected = truncated_log_probs(trainer, request, sample)
            assert torch.isfinite(expected).all(), "a token outside the candidate set was sampled"
            assert torch.tensor(sample.log_probs).sub(expected).abs().max() < self.tolerance

    # ------------------------------------------------------------ randomness

    def test_greedy_decoding_repeats_and_takes_the_most_likely_token(
        self, backend: RolloutBackend, trainer: Trainer
    ) -> None:
        request = self.request(n=2, sampling=SamplingConfig(max_tokens=16, temperature=0.0))
        first, second = self.generate(backend, request).samples
        (again, _) = self.generate(backend, request).samples
        assert first.token_ids == second.token_ids == again.token_ids
        logits = trainer.logits(request.prompt_token_ids + first.token_ids)
        best = logits[len(request.prompt_token_ids) - 1 : -1].argmax(dim=-1)
        assert tuple(best.tolist()) == first.token_ids
        self.check_log_probs(trainer, request, first)

    def test_the_same_seed_repeats(self, backend: RolloutBackend) -> None:
        request = self.request(n=4, seed=1000)
        first, second = self.generate(backend, request), self.generate(backend, request)
        assert token_ids([first]) == token_ids([second])

    def test_sample_i_is_the_single_sample_of_seed_plus_i(self, backend: RolloutBackend) -> None:
        request = self.request(n=4, seed=2000)
        together = self.generate(backend, request)
        alone = [
            self.generate(backend, self.request(str(i), prompt=request.prompt_token_ids, seed=2000 + i))
            for i in range(4)
        ]
        assert [s.token_ids for s in together.samples] == [r.samples[0].token_ids for r in alone]

    def test_other_seeds_and_no_seed_give_other_samples(self, backend: RolloutBackend) -> None:
        prompt = self.prompt(3)
        requests = [self.request(str(i), prompt=prompt, seed=seed) for i, seed in enumerate([5, 6, None, None])]
        samples = [self.generate(backend, request).samples[0].token_ids for request in requests]
        assert len(set(samples)) == 4

    # ------------------------------------------------------------ concurrency

    def test_concurrent_requests_return_to_their_owners(self, backend: RolloutBackend, trainer: Trainer) -> None:
        requests = [
            self.request(f"r{i}", prompt=self.prompt(i, length=2 + 3 * i), n=1 + i % 3, seed=100 * i)
            for i in range(24)
        ]
        results = self.run(generate_all(backend, requests))
        for request, result in zip(requests, results, strict=True):
            assert result.request_id == request.request_id
            assert len(result.samples) == request.n
            for sample in result.samples:
                self.check_sample(sample, request, backend.weight_version)
                self.check_log_probs(trainer, request, sample)

    def test_a_cancelled_request_does_no_harm(self, backend: RolloutBackend) -> None:
        async def cancel_one() -> GenerationResult:
            doomed = asyncio.create_task(backend.generate(self.long_requests()[0]))
            await asyncio.sleep(0.02)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            return await backend.generate(self.request("survivor"))

        assert self.run(cancel_one()).request_id == "survivor"

    # ------------------------------------------------------------ log-probs

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probs_are_those_of_a_forward_pass(
        self, backend: RolloutBackend, trainer: Trainer, temperature: float
    ) -> None:
        sampling = SamplingConfig(max_tokens=40, temperature=temperature)
        request = self.request(n=4, sampling=sampling, prompt=self.prompt(1, length=70))
        for sample in self.generate(backend, request).samples:
            self.check_log_probs(trainer, request, sample)

    # ------------------------------------------------------------ pause and resume

    def test_paused_with_keep_requests_go_on_as_if_nothing_had_happened(self, backend: RolloutBackend) -> None:
        self.need_pause_mode(backend, "keep")
        whole, interrupted = self.interrupted(backend, "keep", lambda results: True)
        assert token_ids(whole) == token_ids(interrupted)

    def test_paused_with_abort_requests_end_with_what_they_have(self, backend: RolloutBackend) -> None:
        self.need_pause_mode(backend, "abort")

        def cut_off(results: Results) -> bool:
            return any(0 < s.length < self.long_tokens for r in results for s in r.samples)

        whole, interrupted = self.interrupted(backend, "abort", cut_off)
        for complete, partial in zip(whole, interrupted, strict=True):
            for full, part in zip(complete.samples, partial.samples, strict=True):
                assert part.token_ids == full.token_ids[: part.length]
                assert (part.finish_reason == "abort") == (part.length < self.long_tokens)

    def test_requests_wait_while_paused(self, backend: RolloutBackend) -> None:
        async def wait_and_go_on() -> GenerationResult:
            await backend.pause("keep" if "keep" in backend.capabilities.pause_modes else "abort")
            task = asyncio.create_task(backend.generate(self.request("waiting")))
            await asyncio.sleep(0.2)
            assert not task.done()
            await backend.resume()
            return await task

        assert self.run(wait_and_go_on()).request_id == "waiting"

    # ------------------------------------------------------------ weight sync

    @pytest.mark.parametrize("kind", ["local", "gloo"])
    def test_a_sync_brings_the_trainers_weights(self, backend: RolloutBackend, trainer: Trainer, kind: str) -> None:
        if kind not in backend.capabilities.transports:
            pytest.skip(f"the backend does not list the transport {kind}")
        # A long prompt, twice: cached prompt states of the old weights must not survive.
        request = self.request(n=4, prompt=self.prompt(2, length=100), sampling=SamplingConfig(max_tokens=24))
        old = self.generate(backend, request)
        trainer.perturb()
        gap = max(self.log_prob_gap(trainer, request, sample) for sample in old.samples)
        assert gap > 0.05, "the changed weights must show, or the check below proves nothing"
        before = backend.weight_version
        version = self.run(sync(backend, trainer, kind=kind, version=before + 3))
        assert backend.weight_version == version == before + 3
        for sample in self.generate(backend, request).samples:
            assert set(sample.weight_versions) == {version}
            self.check_log_probs(trainer, request, sample)

    def test_one_link_serves_several_syncs(self, backend: RolloutBackend, trainer: Trainer) -> None:
        async def twice() -> None:
            sender = await connect(backend, cpu_transport(backend), timeout_s=30)
            for _ in range(2):
                trainer.perturb()
                await send_and_receive(backend, trainer, sender, trainer.manifest(backend.weight_version + 1))
            sender.close()

        self.run(twice())
        request = self.request(n=2)
        for sample in self.generate(backend, request).samples:
            self.check_log_probs(trainer, request, sample)

    def test_a_sync_amid_running_requests_changes_versions_between_tokens(
        self, backend: RolloutBackend, trainer: Trainer
    ) -> None:
        for _ in range(8):
            trainer.perturb()
            old = backend.weight_version
            results = self.run(self.sync_amid(backend, trainer))
            versions = [sample.weight_versions for result in results for sample in result.samples]
            assert all(list(v) == sorted(v) for v in versions)
            assert {version for v in versions for version in v} <= {old, old + 1}
            if any(len(set(v)) == 2 for v in versions):
                break
        else:
            pytest.fail(f"no request was caught running by 8 syncs; raise long_tokens ({self.long_tokens})")
        for request, result in zip(self.long_requests(), results, strict=True):
            for sample in result.samples:
                new = torch.tensor(sample.weight_versions) == old + 1
                gap = trainer.log_probs(self.unrestricted(request), sample) - torch.tensor(sample.log_probs)
                # Exact but for end-of-text, which long requests may not sample: its share of the mass.
                assert (gap[new].abs() < 0.5).all()
                assert (gap[new].abs().median() if new.any() else 0) < 0.02

    @pytest.mark.parametrize("fault", ["sender closes", "unknown name", "missing name"])
    def test_after_a_failed_sync_it_refuses_to_sample_until_a_good_one(
        self, backend: RolloutBackend, trainer: Trainer, fault: str
    ) -> None:
        with pytest.raises(WeightSyncError):
            self.run(broken_sync(backend, trainer, fault))
        request = self.request()
        with pytest.raises(StaleWeightsError):
            self.generate(backend, request)
        trainer.perturb()
        self.run(sync(backend, trainer))
        (sample,) = self.generate(backend, request).samples
        self.check_log_probs(trainer, request, sample)

    def test_it_serves_again_after_sleep_wake_and_sync(self, backend: RolloutBackend, trainer: Trainer) -> None:
        async def nap() -> None:
            await backend.pause("keep" if "keep" in backend.capabilities.pause_modes else "abort")
            await backend.sleep()
            await backend.wake()
            await sync(backend, trainer)
            await backend.resume()

        self.run(nap())
        request = self.request()
        (sample,) = self.generate(backend, request).samples
        self.check_log_probs(trainer, request, sample)

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
        prompt: tuple[int, ...] | None = None,
        sampling: SamplingConfig | None = None,
        n: int = 1,
        seed: int | None = 0,
    ) -> GenerationRequest:
        """A request with defaults."""
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt or self.prompt(0),
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

    def unrestricted(self, request: GenerationRequest) -> GenerationRequest:
        """The request without `min_tokens`."""
        return replace(request, sampling=replace(request.sampling, min_tokens=0))

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


def token_ids(results: Results) -> list[tuple[int, ...]]:
    """The tokens of all samples of all results."""
    return [sample.token_ids for result in results for sample in result.samples]


def truncated_log_probs(trainer: Trainer, request: GenerationRequest, sample: Sample) -> torch.Tensor:
    """Log-probs under the truncated and renormalised distribution; -inf outside the candidate set. [tokens]"""
    sampling = request.sampling
    logits = trainer.logits(request.prompt_token_ids + sample.token_ids)[len(request.prompt_token_ids) - 1 : -1]
    probs = (logits / sampling.temperature).softmax(dim=-1)
    ordered, order = probs.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        keep[:, sampling.top_k :] = False
    # A token stays if the mass before it has not reached top_p: the smallest set that reaches it.
    keep &= ordered.cumsum(dim=-1) - ordered < sampling.top_p
    keep &= ordered >= sampling.min_p * ordered[:, :1]
    kept = torch.zeros_like(probs).scatter(-1, order, ordered.where(keep, 0.0))
    targets = torch.tensor(sample.token_ids).unsqueeze(-1)
    return (kept / kept.sum(dim=-1, keepdim=True)).log().gather(-1, targets).squeeze(-1)
