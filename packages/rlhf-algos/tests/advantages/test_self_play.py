import pytest
import torch
from rlhf_algos.advantages.self_play import RoleBaselines
from rlhf_core import ConfigError


def test_each_role_has_its_own_average():
    """The first player wins for ever: its advantage fades, and the second player's loss does too."""
    baselines = RoleBaselines(decay=0.5)
    first = [baselines.advantages(torch.tensor([1.0, -1.0]), ["white", "black"]).tolist() for _ in range(3)]
    assert first == [[1, -1], [0.5, -0.5], [0.25, -0.25]]


def test_the_averages_survive_a_restart():
    baselines = RoleBaselines()
    baselines.advantages(torch.tensor([1.0]), ["white"])
    other = RoleBaselines()
    other.load_state_dict(baselines.state_dict())
    assert other.values == {"white": pytest.approx(0.05)}


def test_refused():
    with pytest.raises(ConfigError, match="decay"):
        RoleBaselines(decay=1.0)
