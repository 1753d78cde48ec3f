import pytest
from rlhf_core import ConfigError
from rlhf_train.model.build import freeze, gather_whole, mark_expert_blocks
from torch import nn


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


def test_blocks_with_experts_of_their_own_are_gathered_whole():
    model = nn.Sequential(nn.Linear(4, 4), Routed())
    assert mark_expert_blocks(model) == ["1"]
    assert model[1]._z3_leaf


def test_modules_that_run_over_tiles_are_gathered_whole():
    model = two_layers()
    gather_whole(model, ["1"])
    assert model[1]._z3_leaf
    assert not hasattr(model[0], "_z3_leaf")


def test_other_lists_of_modules_are_left_alone():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])})
    assert mark_expert_blocks(model) == []


def two_layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_patterns_choose_by_name():
    model = two_layers()
    assert freeze(model, ["0.*", "*.bias"]) == ["0.weight", "0.bias", "1.bias"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["1.weight"]


def test_no_pattern_freezes_nothing():
    model = two_layers()
    assert freeze(model, []) == []
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"'3\.\*' matches no parameter of Sequential; names are like 0\.weight"):
        freeze(two_layers(), ["3.*"])


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        freeze(two_layers(), ["*"])
