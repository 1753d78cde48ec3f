from types import SimpleNamespace

import pytest
import torch
from rlhf_core import ConfigError, OneRank, RewardScale, measured_scale


def model(**config):
    return SimpleNamespace(config=SimpleNamespace(**config))


def test_the_scale_is_measured_over_all_rows():
    scale = measured_scale(torch.tensor([1.0, 3.0]), OneRank())
    assert scale == RewardScale(mean=2.0, std=1.0)
    assert scale.apply(torch.tensor([1.0, 2.0])).tolist() == [-1.0, 0.0]


def test_it_is_kept_in_the_config():
    one = model()
    assert RewardScale.of(one) is None
    RewardScale(mean=0.5, std=2.0).store(one)
    assert RewardScale.of(one) == RewardScale(mean=0.5, std=2.0)


def test_equal_scores_have_no_scale():
    with pytest.raises(ConfigError, match="samples whose scores differ"):
        measured_scale(torch.ones(3), OneRank())


def test_half_a_scale_is_refused():
    with pytest.raises(ConfigError, match="give both"):
        RewardScale.of(model(reward_mean=1.0))
