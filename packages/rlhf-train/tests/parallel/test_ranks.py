import pytest
from rlhf_core import ConfigError, EngineConfig
from rlhf_train import env_vars
from rlhf_train.parallel.ranks import RankInfo, TrainingRanks, join_training_ranks

COMPLETE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "1"}


@pytest.fixture
def environment(monkeypatch):
    for name in COMPLETE:
        monkeypatch.delenv(name, raising=False)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_no_variables_mean_a_single_rank(environment):
    assert RankInfo.from_env_vars() is None


def test_ranks_are_read_from_the_environment(environment):
    environment(**COMPLETE)
    assert RankInfo.from_env_vars() == RankInfo(rank=1, world_size=2, local_rank=0)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "missing: LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({**COMPLETE, "RANK": "one"}, "whole numbers"),
        ({**COMPLETE, "RANK": "2"}, "outside 0..WORLD_SIZE-1=1"),
    ],
)
def test_an_incomplete_environment_is_refused(environment, values, complaint):
    environment(**values)
    with pytest.raises(ConfigError, match=complaint):
        RankInfo.from_env_vars()


def test_one_rank_reduces_nothing():
    ranks = TrainingRanks(RankInfo())
    assert (ranks.size, ranks.sum([1.5, 2.0]), ranks.max(3), ranks.gather("x")) == (1, [1.5, 2.0], 3, ["x"])


@pytest.mark.parametrize(
    ("device", "complaint"), [("tpu", "runs on 'cpu' or 'cuda'"), ("cuda", "torch sees no CUDA device")]
)
def test_a_device_that_is_not_there_is_refused(device, complaint, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=complaint):
        join_training_ranks(EngineConfig(model="m", device=device), timeout_s=5)


def test_the_env_vars_names_the_accelerator(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = env_vars(EngineConfig(model="m", device="cuda:1"))
    assert found["DS_ACCELERATOR"] == "cuda"
    assert found["OMP_NUM_THREADS"] == "3"
