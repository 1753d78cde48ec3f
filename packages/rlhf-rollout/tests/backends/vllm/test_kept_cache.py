"""Keys and values kept over a sync by choice: who keeps what, and what the log-probs then are."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rlhf_core import (
    GenerationRequest,
    GenerationResult,
    RolloutBackend,
    RolloutConfig,
    Sample,
    SamplingConfig,
    log_probs_from_logits,
)
from rlhf_core.testing.rollout import RolloutBackendConformance
from rlhf_core.testing.rollout_ground import EOS
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, sync
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack

PROMPT = tuple(range(40, 140))
ASKED = GenerationRequest(
    request_id="r", prompt_token_ids=PROMPT, sampling=SamplingConfig(max_tokens=380), n=4, seed=1
)


class TestKeptCache(RolloutBackendConformance):
    """All that a backend must do, but that tokens after a sync are those of the new weights alone."""

    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls) -> Callable[[RolloutConfig], RolloutBackend]:
        return VLLMBackend

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=cls.vocab_size, hidden_size=128)

    @pytest.fixture(scope="class")
    @classmethod
    def rollout_config(cls, model_path: str) -> RolloutConfig:
        return config(model_path, max_num_seqs=32)


def config(model: str, **fields: Any) -> RolloutConfig:
    return RolloutConfig(
        **{"model": model, "max_model_len": 512, "keep_kv_cache": True, "max_num_seqs": 8, **fields}
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128)


@pytest.fixture(scope="module", params=[False, True], ids=["steps in turn", "steps overlap"])
def backend(request: pytest.FixtureRequest, model_path: str) -> Iterator[VLLMBackend]:
    backend = VLLMBackend(config(model_path, options={"async_scheduling": request.param}))
    yield backend
    backend.close()


@pytest.fixture
def trainer(backend: VLLMBackend, model_path: str) -> Trainer:
    trainer = Trainer(model_path)
    asyncio.run(sync(backend, trainer))
    return trainer


@torch.no_grad()
def by_kept_states(models: dict[int, Any], sample: Sample) -> torch.Tensor:
    """Log-probs of a sample's tokens where each version reads the keys and values that the ones before it made.

    The last token that a version samples is read by the next one. [tokens]
    """
    versions = list(sample.weight_versions)
    tokens = torch.tensor([[*PROMPT, *sample.token_ids]])
    states, logits, begin = None, [], 0
    for version in sorted(set(versions)):
        end = len(PROMPT) - 1 + versions.count(version) + versions.index(version)
        output = models[version](tokens[:, begin:end], past_key_values=states, use_cache=True)
        states, begin = output.past_key_values, end
        logits.append(output.logits[0])
    before = torch.cat(logits)[len(PROMPT) - 1 :]
    return log_probs_from_logits(before, tokens[0, len(PROMPT) :])


def gap(expected: torch.Tensor, sample: Sample, *, of: slice = slice(None)) -> float:
    return float((expected - torch.tensor(sample.log_probs))[of].abs().max())


def computed_tokens(engine: Any) -> int:
    """Tokens whose keys and values running requests have."""
    return sum(request.num_computed_tokens for request in engine.engine_core.engine_core.scheduler.running)


def test_running_requests_read_older_keys_and_values_and_log_probs_are_those_sampled_from(
    backend: VLLMBackend, trainer: Trainer
) -> None:
    """Two large updates amid the samples, each with a probe, as in a run. The mismatch that a trainer then sees
    shows that states were kept; the log-probs returned are those of the states that were."""
    models = {backend.weight_version: copy.deepcopy(trainer.model)}
    row = tuple(range(200, 260))

    async def interrupted() -> GenerationResult:
        task = asyncio.create_task(backend.generate(ASKED))
        for _ in range(2):
            await asyncio.sleep(0.15)
            await backend.pause("keep")
            kept = await backend._call(computed_tokens)
            assert kept > len(PROMPT)
            trainer.perturb()
            models[await sync(backend, trainer)] = copy.deepcopy(trainer.model)
            (scores,) = await backend.score_tokens([row])
            assert (trainer.row_log_probs(row) - torch.tensor(scores)).abs().max() < 1e-4
            assert await backend._call(computed_tokens) == kept
            await backend.resume()
        assert not task.done()
        return await task

    result = asyncio.run(interrupted())
    crossed = [sample for sample in result.samples if len(set(sample.weight_versions)) == 3]
    assert crossed
    for sample in crossed:
        assert gap(by_kept_states(models, sample), sample) < 1e-4
        new = slice(list(sample.weight_versions).index(backend.weight_version), None)
        assert gap(trainer.log_probs(ASKED, sample), sample, of=new) > 0.05


def test_requests_after_a_sync_take_no_blocks_of_older_weights(backend: VLLMBackend, trainer: Trainer) -> None:
    """The same prompt, and a second turn behind a sample begun before the sync: both are the new weights' own."""

    async def interrupted() -> tuple[GenerationResult, GenerationResult, GenerationRequest, GenerationResult]:
        task = asyncio.create_task(backend.generate(ASKED))
        await asyncio.sleep(0.15)
        trainer.perturb()
        await sync(backend, trainer)
        fresh = await backend.generate(replace(ASKED, sampling=SamplingConfig(max_tokens=8)))
        crossed = await task
        tokens = (*PROMPT, *crossed.samples[0].token_ids, 7, 8, 9)[-480:]
        second = replace(
            ASKED, prompt_token_ids=(*PROMPT, *tokens[len(PROMPT) :]), sampling=SamplingConfig(max_tokens=8)
        )
        return crossed, fresh, second, await backend.generate(second)

    crossed, fresh, second, after = asyncio.run(interrupted())
    assert any(len(set(sample.weight_versions)) == 2 for sample in crossed.samples)
    for asked, result in ((ASKED, fresh), (second, after)):
        for sample in result.samples:
            assert set(sample.weight_versions) == {backend.weight_version}
            assert gap(trainer.log_probs(asked, sample), sample) < 1e-4


def test_requests_that_wait_at_a_sync_begin_with_the_new_weights(backend: VLLMBackend, trainer: Trainer) -> None:
    """There is room for 8 samples: of 16 of one prompt half wait, and the others have made its blocks."""
    old = copy.deepcopy(trainer)
    first = backend.weight_version
    asked = replace(ASKED, n=16, sampling=SamplingConfig(max_tokens=120))

    async def interrupted() -> GenerationResult:
        task = asyncio.create_task(backend.generate(asked))
        await asyncio.sleep(0.1)
        trainer.perturb()
        await sync(backend, trainer)
        return await task

    samples = asyncio.run(interrupted()).samples
    begun = [sample for sample in samples if sample.weight_versions[0] == first]
    late = [sample for sample in samples if sample.weight_versions[0] != first]
    assert begun
    assert late
    for sample in late:
        assert gap(trainer.log_probs(asked, sample), sample) < 1e-4
    models = {first: old.model, first + 1: trainer.model}
    for sample in begun:
        assert gap(by_kept_states(models, sample), sample) < 1e-4


def test_a_probe_for_which_there_is_no_room_takes_it_from_the_latest_requests(
    backend: VLLMBackend, trainer: Trainer
) -> None:
    """All 8 places are taken; two rows need two, so two requests are computed again and six are not."""
    asked = replace(ASKED, n=8, sampling=SamplingConfig(max_tokens=200, min_tokens=200))
    rows = [tuple(range(200, 260)), tuple(range(300, 330))]

    async def probed() -> tuple[GenerationResult, int, int]:
        task = asyncio.create_task(backend.generate(asked))
        await asyncio.sleep(0.15)
        await backend.pause("keep")
        running = lambda engine: len(engine.engine_core.engine_core.scheduler.running)  # noqa: E731
        before = await backend._call(running)
        for row, scores in zip(rows, await backend.score_tokens(rows), strict=True):
            assert (trainer.row_log_probs(row) - torch.tensor(scores)).abs().max() < 1e-4
        after = await backend._call(running)
        await backend.resume()
        return await task, before, after

    result, before, after = asyncio.run(probed())
    assert (before, after) == (8, 6)
    for sample in result.samples:
        assert gap(trainer.log_probs(asked, sample, banned=(EOS,)), sample) < 1e-4
