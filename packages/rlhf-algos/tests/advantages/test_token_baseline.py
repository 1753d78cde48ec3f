import pytest
import torch
from rlhf_algos.advantages.registry import make_advantage
from rlhf_core import Batch, ConfigError

T, F = True, False
MASK = torch.tensor([[F, T, F, T, T], [F, T, T, F, F]])
PROBABILITY = torch.tensor([[9.0, 0.5, 9.0, 0.25, 0.5], [9.0, 0.75, 0.5, 9.0, 9.0]], dtype=torch.float64)
COLLISION = torch.tensor([[9.0, 0.5, 9.0, 0.5, 0.5], [9.0, 0.75, 0.25, 9.0, 9.0]], dtype=torch.float64)


def advantages(scores, ids=(0, 0), rewards=None, **options):
    columns = {"old_log_probs": PROBABILITY.log(), "old_log_collision": COLLISION.log()}
    if rewards is not None:
        columns["rewards"] = torch.tensor(rewards, dtype=torch.float64)
    batch = Batch(token_ids=MASK.long(), attention_mask=MASK | True, response_mask=MASK, columns=columns)
    advantage = make_advantage("optimal_token", {"eps": 0.0, **options})
    return advantage(torch.tensor(scores, dtype=torch.float64), torch.tensor(ids), batch)


def test_by_hand():
    """Weights per token 1 - 2 p + c: (0.5, 1, 0.5) and (0.25, 0.25); sums (0.5, 1.5, 2) and (0.25, 0.5)."""
    first = 0.5 / (0.5 + 0.25)
    second = 1.5 / (1.5 + 0.5)
    got = advantages([1.0, 0.0])
    expected = torch.tensor([[0, 1 - first, 0, 1 - second, 0], [0, -first, -second, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(got, expected)


def test_the_tail_that_no_sibling_has():
    assert float(advantages([1.0, 0.0], tail="score")[0, 4]) == 1.0
    assert float(advantages([1.0, 0.0], tail="zero")[0, 4]) == 0.0


def test_rewards_keep_their_places():
    """The first response earned all of it at its first token: later ones have nothing to gain."""
    got = advantages([1.0, 0.0], rewards=[[0.0, 1.0, 0.0, 0.0, 0.0], [0.0] * 5])
    assert got[0].tolist() == pytest.approx([0, 1 - 2 / 3, 0, 0, 0])


def test_lone_responses():
    assert advantages([1.0, 2.0], ids=(0, 1)).abs().max() == 0
    kept = advantages([1.0, 2.0], ids=(0, 1), singleton="score")
    assert kept.tolist() == [[0, 1, 0, 1, 1], [0, 2, 2, 0, 0]]
    assert make_advantage("optimal_token").says("old_outputs") == ("log_collision",)
    with pytest.raises(ConfigError, match="tail"):
        make_advantage("optimal_token", {"tail": "none"})
