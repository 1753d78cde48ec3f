import pytest
import torch
from rlhf_algos.advantages.registry import ESTIMATORS, estimator
from rlhf_core import Batch, ConfigError, PluginError

MASK = torch.tensor([[True, True], [True, False]])
ROWS = Batch(
    token_ids=torch.ones(2, 2, dtype=torch.long),
    attention_mask=MASK,
    response_mask=MASK,
    columns={"greedy_scores": torch.tensor([0.5, 0.5])},
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_mean", [-1.0, 1.0]),
        ("rloo", [-2.0, 2.0]),
        ("reinforce", [1.0, 3.0]),
        ("remax", [0.5, 2.5]),
        ("opo", [1 - 5 / 3, 3 - 5 / 3]),
        ("grpo", [-(0.5**0.5), 0.5**0.5]),
    ],
)
def test_each_by_hand(name, expected):
    got = estimator(name)(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), ROWS)
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


def test_all_are_covered():
    assert sorted(ESTIMATORS) == ["group_mean", "grpo", "opo", "reinforce", "remax", "rloo"]


def test_by_path_and_unknown():
    assert estimator("rlhf_algos.advantages.groups:rloo_advantages").__name__ == "rloo_advantages"
    with pytest.raises(ConfigError, match="did you mean 'rloo'"):
        estimator("rlo")
    with pytest.raises(PluginError):
        estimator("no_such_module:f")
