import math
from itertools import combinations

import pytest
import torch
from rlhf_algos.advantages.registry import make_advantage
from rlhf_core import Batch, ConfigError


def advantages(name, scores, ids, **options):
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    rows = Batch(token_ids=mask.long(), attention_mask=mask, response_mask=mask)
    scores = torch.tensor(scores, dtype=torch.float64)
    return make_advantage(name, options)(scores, torch.tensor(ids), rows).tolist()


def test_gpg_makes_up_for_groups_without_a_gradient():
    """Two of six rows are in a group whose scores are equal: alpha is 6 / 4."""
    got = advantages("gpg", [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1, 2, 2])
    assert got == pytest.approx([0.75, -0.75, 0, 0, -0.75, 0.75])
    assert advantages("gpg", [1.0, 1.0], [0, 0]) == [0, 0]


def test_max_rl_divides_by_the_pass_rate():
    got = advantages("max_rl", [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1])
    assert got == pytest.approx([3, -1, -1, -1, 0, 0])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    """Each subset of k scores 1 if one of it passes; a response has the mean of its subsets' centred scores."""
    scores = [1.0, 0.0, 0.0, 1.0, 0.0]
    subsets = list(combinations(range(5), k))
    passes = [max(scores[i] for i in subset) for subset in subsets]
    mean = sum(passes) / len(passes)
    deviation = math.sqrt(mean * (1 - mean))
    expected = []
    for row in range(5):
        own = [value for subset, value in zip(subsets, passes, strict=True) if row in subset]
        expected.append((sum(own) / len(own) - mean) / deviation)
    assert advantages("pass_at_k", scores, [3] * 5, k=k, eps=0.0) == pytest.approx(expected)


def test_pass_at_k_without_a_signal():
    for scores in ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0]):
        assert advantages("pass_at_k", scores, [0] * len(scores), k=3) == [0.0] * len(scores)
    assert make_advantage("pass_at_k", {"k": 8}).says("min_samples_per_prompt") == 9
    with pytest.raises(ConfigError, match="at least 1"):
        make_advantage("pass_at_k", {"k": 0})


def test_the_best_of_a_group_gains_over_the_next_best():
    got = advantages("best_of_group", [3.0, 1.0, 0.5, 2.0, 2.0], [0, 0, 0, 1, 1], scale="none")
    assert got == [2, 0, 0, 0, 0]
    scaled = advantages("best_of_group", [3.0, 1.0, 2.0], [0, 0, 0], eps=0.0)
    assert scaled == [1, 0, 0]
    with pytest.raises(ConfigError, match="group, none"):
        make_advantage("best_of_group", {"scale": "batch"})
