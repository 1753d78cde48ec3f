"""Real vLLM engines in processes of their own, one of them killed in the middle of a weight sync."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_core import (
    EngineConfig,
    GenerationRequest,
    ModuleWeights,
    RolloutConfig,
    SamplingConfig,
    StaleWeightsError,
)
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer
from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.handles import LocalHandle
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.train_rank import TrainWorker
from rlhf_launch.workers.waits import Waits
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack

PATIENCE_S = 120.0
KILLED_AT = 5
"""The bucket before which an engine dies."""


class Weights(ModuleWeights):
    """Kills an engine between two buckets, on demand."""

    victim: Any = None

    def gather(self, bucket):
        if bucket.index == KILLED_AT and self.victim is not None:
            self.victim.kill()
            self.victim = None
        return super().gather(bucket)


class Engine:
    """As much of a TrainEngine as a sync needs."""

    def __init__(self, config: EngineConfig) -> None:
        self.trainer = Trainer(config.model)
        self._weights = Weights(self.trainer.model)

    def weights(self) -> Weights:
        return self._weights

    def close(self) -> None:
        pass


class Pool(RolloutPool):
    """Asks an engine for a sample before it joins another link."""

    asked: Exception | object = None

    def connect(self, engines, link):
        self.asked = self.call(0, "generate", request(4)).exception(PATIENCE_S)
        return super().connect(engines, link)


def request(max_tokens: int, prompt: int = 40) -> GenerationRequest:
    sampling = SamplingConfig(max_tokens=max_tokens)
    return GenerationRequest(request_id=f"r{prompt}", prompt_token_ids=(prompt, 41, 42), sampling=sampling, seed=1)


@pytest.fixture(scope="module", autouse=True)
def importable():
    """The module with the process's side, here and in the process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128)


def check(trainers: dict[int, Trainer], asked: GenerationRequest, sample) -> None:
    """Every token's log-prob is that of the model whose version it carries."""
    (version,) = set(sample.weight_versions)
    expected = trainers[version].log_probs(asked, sample)
    assert (expected - torch.tensor(sample.log_probs)).abs().max() < 1e-4


def engines(model: str, count: int) -> list[Any]:
    from engine_process import ProcessHandle

    config = RolloutConfig(model=model, max_model_len=256, max_num_seqs=8)
    environment = {**VLLMBackend.env_vars(config), "OMP_NUM_THREADS": "1"}
    return [ProcessHandle(f"rollout-{i}", "vllm", config, environment) for i in range(count)]


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_an_engine_killed_between_two_buckets_leaves_no_mixture_behind(model: str, transport: str) -> None:
    handles = engines(model, 2)
    worker = TrainWorker(f"{__name__}:Engine", EngineConfig(model=str(Path(model)), role="policy"), {})
    policy = TrainGroup("policy", [LocalHandle("policy-0", lambda: worker)], waits=Waits(PATIENCE_S))
    pool = Pool(handles, waits=Waits(PATIENCE_S))
    try:
        policy.start()
        pool.start()
        options = WeightSyncSection(bucket_bytes=32 << 10, probe_every=0)  # this policy scores nothing
        sync = WeightSync(policy, pool, transports=(transport,), options=options)
        assert sync(1).lost == ()
        assert sync(2).buckets > 2 * KILLED_AT
        trainers = {2: copy.deepcopy(worker.engine.trainer)}
        worker.engine.trainer.perturb()
        trainers[3] = worker.engine.trainer

        running = [request(200, prompt) for prompt in range(40, 44)]
        answers = [pool.call(0, "generate", one) for one in running]
        worker.engine.weights().victim = handles[1]
        report = sync(3)

        assert report.lost == ("engine 1: rollout-1 died during receive_weights",)
        assert isinstance(pool.asked, StaleWeightsError), "an engine with half the weights served"
        assert pool.live == [0]
        assert pool.weight_versions() == [3]
        for asked, answer in zip(running, answers, strict=True):
            if (error := answer.exception(PATIENCE_S)) is None:
                check(trainers, asked, answer.result().samples[0])
            else:
                assert isinstance(error, StaleWeightsError)
        after = pool.call(0, "generate", request(20)).result(PATIENCE_S).samples[0]
        assert set(after.weight_versions) == {3}
        check(trainers, request(20), after)
    finally:
        pool.close()
        policy.close()
