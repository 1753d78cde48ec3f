"""Asynchronous scheduling: a step is handed out before the last one was read, and none is when weights change."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rlhf_core import (
    ConfigError,
    GenerationRequest,
    GenerationResult,
    RolloutBackend,
    RolloutConfig,
    SamplingConfig,
)
from rlhf_core.testing.rollout import RolloutBackendConformance
from rlhf_core.testing.rollout_ground import EOS
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, sync
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack

OVERLAP = {"async_scheduling": True}
ASKED = [
    GenerationRequest(
        request_id=f"r{index}",
        prompt_token_ids=tuple(range(10 + index, 50)),
        sampling=SamplingConfig(max_tokens=300, min_tokens=300),
        n=2,
        seed=10 * index,
    )
    for index in range(3)
]


class TestOverlappingSteps(RolloutBackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls) -> type[RolloutBackend]:
        return VLLMBackend

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=cls.vocab_size, hidden_size=128)

    @pytest.fixture(scope="class")
    @classmethod
    def rollout_config(cls, model_path: str) -> RolloutConfig:
        return RolloutConfig(model=model_path, max_model_len=cls.max_model_len, max_num_seqs=32, options=OVERLAP)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128)


@pytest.fixture(scope="module")
def backend(model_path: str) -> Iterator[VLLMBackend]:
    backend = VLLMBackend(RolloutConfig(model=model_path, max_model_len=512, max_num_seqs=16, options=OVERLAP))
    yield backend
    backend.close()


def in_flight(backend: VLLMBackend) -> int:
    """Steps that were handed out and not read."""
    return asyncio.run(backend._call(lambda engine: len(engine.engine_core.engine_core.batch_queue)))


def watch_transfers(backend: VLLMBackend, before: list[int], during: list[int]) -> None:
    """Note how many steps are in flight when weights are announced, and when they come."""

    def watch(engine: Any) -> None:
        receive, transfer = backend._weights.receive, backend._weights._transfer
        queue = engine.engine_core.engine_core.batch_queue

        def announced(*arguments: Any) -> None:
            before.append(len(queue))
            receive(*arguments)

        def coming(*arguments: Any) -> Any:
            during.append(len(queue))
            return transfer(*arguments)

        backend._weights.receive = announced  # type: ignore[method-assign]
        backend._weights._transfer = coming  # type: ignore[method-assign]

    asyncio.run(backend._call(watch))


def test_steps_overlap_and_give_the_samples_of_steps_that_do_not(backend: VLLMBackend, model_path: str) -> None:
    assert backend.capabilities.settings["async_scheduling"] is True
    assert in_flight(backend) == 0
    alone = VLLMBackend(RolloutConfig(model=model_path, max_model_len=512, max_num_seqs=16))
    try:
        assert alone.capabilities.settings["async_scheduling"] is False
        for one in ASKED:
            assert asyncio.run(backend.generate(one)) == asyncio.run(alone.generate(one))
    finally:
        alone.close()
    assert in_flight(backend) == 0


def test_tokens_in_flight_at_a_sync_carry_the_version_and_log_prob_of_the_weights_that_drew_them(
    backend: VLLMBackend, model_path: str
) -> None:
    """Ten syncs amid generation, over steps in flight; every token is exactly that of its version's weights."""
    trainer = Trainer(model_path)
    asyncio.run(sync(backend, trainer))
    first = backend.weight_version
    models = {first: copy.deepcopy(trainer)}
    before: list[int] = []
    during: list[int] = []
    watch_transfers(backend, before, during)

    async def interrupted() -> list[GenerationResult]:
        tasks = [asyncio.create_task(backend.generate(one)) for one in ASKED]
        for _ in range(10):
            await asyncio.sleep(0.03)
            trainer.perturb(0.02)
            models[await sync(backend, trainer)] = copy.deepcopy(trainer)
        return await asyncio.gather(*tasks)

    try:
        results = asyncio.run(interrupted())
    finally:
        del backend._weights.receive, backend._weights._transfer  # type: ignore[misc]
    assert any(before), "no sync met a step in flight, so nothing is shown"
    assert not any(during)
    versions = [v for result in results for sample in result.samples for v in sample.weight_versions]
    assert len(set(versions)) > 2
    for one, result in zip(ASKED, results, strict=True):
        for sample in result.samples:
            assert sample.length == 300
            expected = {v: models[v].log_probs(one, sample, banned=(EOS,)) for v in set(sample.weight_versions)}
            for index, (version, log_prob) in enumerate(zip(sample.weight_versions, sample.log_probs, strict=True)):
                assert abs(float(expected[version][index]) - log_prob) < 1e-4
    spans = [list(sample.weight_versions) for result in results for sample in result.samples]
    assert all(span == sorted(span) for span in spans)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_pause_leaves_no_step_in_flight_and_no_token_behind(backend: VLLMBackend, mode: Any) -> None:
    whole = [asyncio.run(backend.generate(one)) for one in ASKED]

    async def paused() -> tuple[list[GenerationResult], int]:
        tasks = [asyncio.create_task(backend.generate(one)) for one in ASKED]
        await asyncio.sleep(0.1)
        await backend.pause(mode)
        left = await backend._call(lambda engine: len(engine.engine_core.engine_core.batch_queue))
        await backend.resume()
        return await asyncio.gather(*tasks), left

    results, left = asyncio.run(paused())
    assert left == 0
    for complete, partial in zip(whole, results, strict=True):
        for full, part in zip(complete.samples, partial.samples, strict=True):
            assert part.token_ids == full.token_ids[: part.length]
            assert (part.length == 300) == (mode == "keep")


def test_asleep_and_scored_between_steps_in_flight_samples_stay_exact(
    backend: VLLMBackend, model_path: str
) -> None:
    trainer = Trainer(model_path)
    asyncio.run(sync(backend, trainer))
    one = replace(ASKED[0], sampling=SamplingConfig(max_tokens=300))
    row = tuple(range(60, 90))

    async def disturbed() -> tuple[GenerationResult, list[float]]:
        task = asyncio.create_task(backend.generate(one))
        await asyncio.sleep(0.05)
        (scores,) = await backend.score_tokens([row])
        await backend.pause("keep")
        await backend.sleep()
        await backend.wake()
        await backend.resume()
        return await task, scores

    result, scores = asyncio.run(disturbed())
    assert (trainer.row_log_probs(row) - torch.tensor(scores)).abs().max() < 1e-4
    for sample in result.samples:
        assert (trainer.log_probs(one, sample) - torch.tensor(sample.log_probs)).abs().max() < 1e-4


def test_what_a_cpu_cannot_overlap_is_refused(model_path: str) -> None:
    with pytest.raises(ConfigError, match="worker processes, and this one has 2"):
        VLLMBackend(RolloutConfig(model=model_path, tensor_parallel_size=2, options=OVERLAP))
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="with speculative_config; leave one"):
        VLLMBackend(RolloutConfig(model=model_path, options={**OVERLAP, "speculative_config": speculation}))
