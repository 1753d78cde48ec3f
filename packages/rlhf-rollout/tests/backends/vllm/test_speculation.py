"""Speculative decoding in vLLM: draft tokens that are kept have the log-prob and the version of the policy."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interruptions import paused_amid
from rlhf_core import (
    CapabilityError,
    ConfigError,
    GenerationRequest,
    GenerationResult,
    RolloutConfig,
    SamplingConfig,
)
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, sync
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.fixture(scope="module")
def backend(model_path: str) -> Iterator[VLLMBackend]:
    backend = VLLMBackend(config(model_path, NGRAM))
    yield backend
    backend.close()


def config(model: str, speculation: dict[str, Any]) -> RolloutConfig:
    options = {"speculative_config": speculation}
    return RolloutConfig(model=model, max_model_len=512, max_num_seqs=8, options=options)


def request(max_tokens: int, **sampling: Any) -> GenerationRequest:
    """A prompt that repeats itself, as greedy decoding of it soon does."""
    settings = SamplingConfig(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})
    return GenerationRequest(request_id="r", prompt_token_ids=(40, 41, 42, 43) * 12, sampling=settings)


def test_kept_draft_tokens_have_the_policys_log_probs(backend: VLLMBackend, model_path: str) -> None:
    trainer, asked = Trainer(model_path), request(200)
    steps: list[int] = []

    def count(engine: Any) -> None:
        step = engine.step
        engine.step = lambda: (steps.append(1), step())[1]

    asyncio.run(backend._call(count))
    (sample,) = asyncio.run(backend.generate(asked)).samples
    asyncio.run(backend._call(lambda engine: vars(engine).pop("step")))
    assert len(steps) < 180, "hardly any draft token was kept, so that the check below proves nothing"
    assert (trainer.log_probs(asked, sample) - torch.tensor(sample.log_probs)).abs().max() < 1e-4


def test_versions_change_between_tokens(backend: VLLMBackend, model_path: str) -> None:
    trainer, asked = Trainer(model_path), request(400)
    old = copy.deepcopy(trainer)
    trainer.perturb()

    async def amid() -> GenerationResult:
        task = await paused_amid(backend, asked)
        await sync(backend, trainer)
        await backend.resume()
        return await task

    (sample,) = asyncio.run(amid()).samples
    assert sorted(set(sample.weight_versions)) == [0, 1]
    new = torch.tensor(sample.weight_versions) == 1
    expected = torch.where(new, trainer.log_probs(asked, sample), old.log_probs(asked, sample))
    assert (torch.tensor(sample.log_probs) - expected).abs().max() < 1e-4


def test_what_would_not_be_the_policys_is_refused(backend: VLLMBackend, model_path: str) -> None:
    with pytest.raises(CapabilityError, match="only greedy decoding"):
        asyncio.run(backend.generate(request(8, temperature=1.0)))
    synthetic = {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    with pytest.raises(ConfigError, match="did not draw"):
        VLLMBackend(config(model_path, synthetic))
