import pytest
import torch
from rlhf_algos.advantages.registry import make_advantage
from rlhf_core import Batch, ConfigError

IDS = torch.tensor([0, 0, 1, 1])


def rows(**columns):
    mask = torch.ones(4, 1, dtype=torch.bool)
    columns = {f"score/{name}": torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return Batch(token_ids=mask.long(), attention_mask=mask, response_mask=mask, columns=columns)


def test_gdpo_by_hand():
    """Each pair's parts become +-1/sqrt(2) whatever their scale; then the sum is normalised over the batch."""
    advantage = make_advantage("gdpo", {"parts": {"right": 1.0, "short": 0.5}, "eps": 0.0})
    batch = rows(right=[1.0, 0.0, 0.0, 0.0], short=[0.0, 100.0, 0.2, 0.1])
    got = advantage(torch.zeros(4, dtype=torch.float64), IDS, batch)
    unit = 0.5**0.5
    # `right` is equal in the second group: 0 / 0 would be NaN, so it needs its eps.
    assert got.isnan().any()
    advantage = make_advantage("gdpo", {"parts": {"right": 1.0, "short": 0.5}, "eps": 1e-9})
    total = torch.tensor([unit - unit / 2, -unit + unit / 2, unit / 2, -unit / 2], dtype=torch.float64)
    expected = (total - total.mean()) / total.std()
    torch.testing.assert_close(advantage(torch.zeros(4, dtype=torch.float64), IDS, batch), expected)


def test_gdpo_names_its_parts():
    advantage = make_advantage("gdpo", {"parts": {"right": 1.0}})
    assert advantage.says("score_parts") == ("right",)
    assert not advantage.says("by_steps")
    with pytest.raises(ConfigError, match="parts is empty"):
        make_advantage("gdpo")
    with pytest.raises(KeyError, match="score/right"):
        advantage(torch.zeros(4), IDS, rows())
