"""Checks of a rollout backend at rest: what it says of itself, shape, randomness and log-probs of its samples."""
# ruff: noqa: D102 - the name of each check is its sentence

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_core.data.generation import GenerationResult
from rlhf_core.data.sampling import SamplingConfig
from rlhf_core.errors import CapabilityError
from rlhf_core.interfaces.rollout import BackendCapabilities, RolloutBackend
from rlhf_core.testing.rollout_ground import (
    EOS,
    RolloutGround,
    generate_all,
    penalised_logits,
    processed_log_probs,
    token_ids,
)
from rlhf_core.testing.weight_sync import Trainer


class SamplingChecks(RolloutGround):
    """What a sample must be."""

    # ------------------------------------------------------------ what it says of itself

    def test_it_is_a_rollout_backend(self, backend: RolloutBackend) -> None:
        assert isinstance(backend, RolloutBackend)

    def test_capabilities_are_sane(self, backend: RolloutBackend) -> None:
        capabilities = backend.capabilities
        assert isinstance(capabilities, BackendCapabilities)
        assert capabilities.transports, "a backend without a weight transport cannot be trained"
        known = {"local", "gloo", "shm", "disk", "nccl", "ipc"}
        assert all(kind in known or ":" in kind for kind in capabilities.transports)
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

    def test_log_probs_under_min_tokens_are_those_without_stops(
        self, backend: RolloutBackend, trainer: Trainer
    ) -> None:
        stops = tuple(range(0, self.vocab_size, 3))
        sampling = SamplingConfig(max_tokens=6, min_tokens=6, temperature=0.9, stop_token_ids=stops)
        request = self.request(n=2, sampling=sampling)
        result = self.generate(backend, request)
        assert result.meaning.min_tokens == 6
        for sample in result.samples:
            tokens = request.prompt_token_ids + sample.token_ids
            logits = trainer.logits(tokens)[len(request.prompt_token_ids) - 1 : -1] / sampling.temperature
            logits[:, sorted({EOS, *stops})] = -torch.inf
            targets = torch.tensor(sample.token_ids).unsqueeze(-1)
            expected = logits.log_softmax(dim=-1).gather(-1, targets).squeeze(-1)
            assert torch.tensor(sample.log_probs).sub(expected).abs().max() < self.tolerance

    @pytest.mark.parametrize(
        "truncation",
        [{"top_p": 0.6}, {"top_k": 7}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.5}, {"min_p": 0.2, "top_p": 0.6}],
        ids=str,
    )
    def test_truncated_sampling_renormalises_or_is_refused(
        self, backend: RolloutBackend, trainer: Trainer, truncation: dict[str, Any]
    ) -> None:
        request = self.request(n=2, sampling=SamplingConfig(max_tokens=12, temperature=0.8, **truncation))
        if not backend.capabilities.truncated_sampling:
            with pytest.raises(CapabilityError):
                self.generate(backend, request)
            return
        for sample in self.generate(backend, request).samples:
            expected = processed_log_probs(trainer, request, sample)
            assert torch.isfinite(expected).all(), "a token outside the candidate set was sampled"
            assert torch.tensor(sample.log_probs).sub(expected).abs().max() < self.tolerance

    @pytest.mark.parametrize(
        "penalties",
        [
            {"repetition_penalty": 1.8},
            {"repetition_penalty": 0.6},
            {"presence_penalty": 1.5, "frequency_penalty": -1.0},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "min_p": 0.02, "top_k": 30, "top_p": 0.9},
        ],
        ids=str,
    )
    def test_penalties_change_the_distribution_or_are_refused(
        self, backend: RolloutBackend, trainer: Trainer, penalties: dict[str, Any]
    ) -> None:
        request = self.request(n=2, sampling=SamplingConfig(max_tokens=24, temperature=0.8, **penalties))
        if not backend.capabilities.penalties:
            with pytest.raises(CapabilityError):
                self.generate(backend, request)
            return
        result = self.generate(backend, request)
        assert result.meaning == request.sampling.meaning
        for sample in result.samples:
            expected = processed_log_probs(trainer, request, sample)
            assert torch.isfinite(expected).all(), "a token outside the candidate set was sampled"
            assert torch.tensor(sample.log_probs).sub(expected).abs().max() < self.tolerance

    def test_greedy_decoding_heeds_penalties(self, backend: RolloutBackend, trainer: Trainer) -> None:
        if not backend.capabilities.penalties:
            pytest.skip("the backend has no penalties")
        sampling = SamplingConfig(max_tokens=12, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5)
        request = self.request(sampling=sampling)
        result = self.generate(backend, request)
        (sample,) = result.samples
        logits = penalised_logits(trainer, request, sample)
        assert sample.token_ids == tuple(logits.argmax(dim=-1).tolist())
        expected = logits.log_softmax(dim=-1).amax(dim=-1)
        assert result.meaning == sampling.meaning
        assert torch.tensor(sample.log_probs).sub(expected).abs().max() < self.tolerance

    def test_a_json_schema_leaves_what_fits_or_is_refused(self, backend: RolloutBackend, trainer: Trainer) -> None:
        sampling = SamplingConfig(max_tokens=24, json_schema='{"type": "object", "additionalProperties": false}')
        request = self.request(n=2, sampling=sampling)
        if not backend.capabilities.json_schema:
            with pytest.raises(CapabilityError):
                self.generate(backend, request)
            return
        result = self.generate(backend, request)
        assert result.meaning.constrained, "the log-probs are not those of the trained distribution, and say so"
        free = processed_log_probs(trainer, self.request(sampling=SamplingConfig(max_tokens=24)), result.samples[0])
        drawn = torch.tensor(result.samples[0].log_probs)
        # A token is at least as likely among those that are left; of a random model's, few open an object.
        assert bool((drawn >= free - self.tolerance).all()), "log-probs must be of what the schema leaves"
        assert float(drawn[0] - free[0]) > 1, "the schema had no effect"

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
