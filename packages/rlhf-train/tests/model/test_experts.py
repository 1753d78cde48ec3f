from rlhf_train.model.experts import mark_expert_blocks
from torch import nn


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


def test_blocks_with_experts_of_their_own_are_gathered_whole():
    model = nn.Sequential(nn.Linear(4, 4), Routed())
    assert mark_expert_blocks(model) == ["1"]
    assert model[1]._z3_leaf


def test_other_lists_of_modules_are_left_alone():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])})
    assert mark_expert_blocks(model) == []
