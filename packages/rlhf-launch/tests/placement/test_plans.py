"""Which workers a training engine gets, before any is placed."""

from dataclasses import replace

import pytest
from rlhf_algos import TorchEngine
from rlhf_core import (
    ConfigError,
    EngineConfig,
    OptimizerConfig,
    ResourceError,
    RolloutConfig,
    TrainCapabilities,
)
from rlhf_launch import WorkerRoom, engine_plans, rank_plans
from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.placement.plans import weight_buffer_bytes

POLICY = EngineConfig(model="m", optimizer=OptimizerConfig(learning_rate=1e-3))


def test_each_rank_has_a_worker():
    assert [plan.name for plan in rank_plans("policy", "deepspeed", POLICY, ranks=3)] == [
        *("policy-0", "policy-1", "policy-2"),
    ]


def test_an_engine_of_one_rank_is_not_given_several():
    assert len(rank_plans("policy", "torch", POLICY)) == 1
    with pytest.raises(ResourceError, match="the engine torch has one rank, and 2 are asked for"):
        rank_plans("policy", "torch", POLICY, ranks=2)


class Blind(TorchEngine):
    """An engine that does not measure."""

    @staticmethod
    def capabilities(config):
        return TrainCapabilities()


def test_an_engine_that_cannot_measure_is_given_a_number():
    auto = replace(POLICY, max_tokens_per_micro_batch="auto")
    assert len(rank_plans("policy", "torch", auto)) == 1
    blind = f"{__name__}:Blind"
    assert len(rank_plans("policy", blind, POLICY)) == 1
    with pytest.raises(ConfigError, match=r"policy: the engine .*Blind cannot find out how many tokens"):
        rank_plans("policy", blind, auto)


def threads(plans):
    return [plan.env_vars.get("OMP_NUM_THREADS") for plan in plans]


def test_the_workers_of_a_role_have_its_threads_between_them(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    room = WorkerRoom(threads=7)
    config = EngineConfig(model="m")
    assert threads(rank_plans("policy", "deepspeed", config, ranks=2, room=room)) == ["3", "3"]
    assert threads(rank_plans("policy", "deepspeed", config, ranks=8, room=room)) == ["1"] * 8
    rollout = RolloutConfig(model="m")
    (plan,) = engine_plans("vllm", rollout, room=room)
    assert (plan.env_vars["OMP_NUM_THREADS"], plan.env_vars["OMP_WAIT_POLICY"]) == ("7", "PASSIVE")
    chosen = RolloutConfig(model="m", options={"cpu_threads": 2})
    assert threads(engine_plans("vllm", chosen, room=room)) == ["2"]
    assert threads(engine_plans("vllm", rollout)) == [None]


def test_threads_that_the_user_has_set_stand(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    room = WorkerRoom(threads=8)
    assert threads(rank_plans("policy", "deepspeed", EngineConfig(model="m"), ranks=2, room=room)) == ["5", "5"]
    assert threads(engine_plans("vllm", RolloutConfig(model="m"), room=room)) == ["5"]


@pytest.mark.parametrize(
    ("device", "transport", "shares_devices", "mib"),
    [
        *(("cuda", None, False, 256 + 2 * 8), ("cuda", "nccl", False, 256 + 2 * 8)),
        *(("cpu", None, False, 0), ("cuda", "gloo", False, 0), ("cuda", None, True, 0)),
    ],
)
def test_an_engine_is_told_what_weight_links_take_of_its_gpu(device, transport, shares_devices, mib):
    weights = WeightSyncSection(transport=transport, bucket_bytes=8 << 20)
    assert weight_buffer_bytes(device, weights, shares_devices=shares_devices) >> 20 == mib
    assert weight_buffer_bytes(device, None, shares_devices=shares_devices) == 0
