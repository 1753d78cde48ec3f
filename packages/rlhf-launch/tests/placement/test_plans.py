"""Which workers a training engine gets, before any is placed."""

import pytest
from rlhf_core import EngineConfig, OptimizerConfig, ResourceError
from rlhf_launch import rank_plans

POLICY = EngineConfig(model="m", optimizer=OptimizerConfig(learning_rate=1e-3))


def test_each_rank_has_a_worker():
    assert [plan.name for plan in rank_plans("policy", "deepspeed", POLICY, ranks=3)] == [
        *("policy-0", "policy-1", "policy-2"),
    ]


def test_an_engine_of_one_rank_is_not_given_several():
    assert len(rank_plans("policy", "torch", POLICY)) == 1
    with pytest.raises(ResourceError, match="the engine torch has one rank, and 2 are asked for"):
        rank_plans("policy", "torch", POLICY, ranks=2)
