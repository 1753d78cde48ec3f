import math

import pytest
import torch
from rlhf_algos.advantages.reward_shaping import (
    RewardShaping,
    overlong_penalty,
    place_scores,
    placed_rewards,
    shape_scores,
    token_kl,
)
from rlhf_core import Batch, ConfigError

MASK = torch.tensor([[False, True, True, False], [False, True, False, False], [False, False, False, False]])


def batch(**columns):
    return Batch(
        token_ids=torch.zeros(3, 4, dtype=torch.long),
        attention_mask=torch.ones(3, 4, dtype=torch.bool),
        response_mask=MASK,
        columns=columns,
    )


def test_scores_go_to_the_last_sampled_token_only():
    got = place_scores(torch.tensor([1.0, 2.0, 3.0]), MASK)
    assert got.tolist() == [[0, 0, 1, 0], [0, 2, 0, 0], [0, 0, 0, 0]]


def test_parts_of_a_score_stay_where_they_fell():
    """The first row earned 0.5 at its first token and 1 in all; the last one sampled nothing."""
    steps = torch.tensor([[9.0, 0.5, 0.0, 9.0], [0.0, 2.0, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    got = placed_rewards(torch.tensor([1.0, 2.0 + 1e-9, 3.0]), batch(rewards=steps))
    assert got.tolist() == [[0, 0.5, 0.5, 0], [0, 2, 0, 0], [0, 0, 0, 0]]


def test_kl_at_every_sampled_token():
    columns = {"old_log_probs": torch.full((3, 4), -1.0), "ref_log_probs": torch.full((3, 4), -3.0)}
    assert token_kl(batch(**columns)).tolist() == [[0, 2, 2, 0], [0, 2, 0, 0], [0, 0, 0, 0]]
    assert token_kl(batch(**columns), value_limit=0.5).max() == 0.5
    limited = token_kl(batch(**columns), "k3", log_ratio_limit=1.0)
    assert float(limited.max()) == pytest.approx(math.exp(-1))


def test_kl_without_reference_is_refused():
    with pytest.raises(ConfigError, match="ref_log_probs"):
        token_kl(batch())


def test_overlong_penalty_by_hand():
    got = overlong_penalty(torch.tensor([5, 6, 7, 8, 10, 30]), max_length=10, buffer=4, penalty=2.0)
    assert got.tolist() == pytest.approx([0, 0, -0.5, -1, -2, -2])
    growing = overlong_penalty(torch.tensor([10, 12, 30]), max_length=10, buffer=4, penalty=2.0, grows=True)
    assert growing.tolist() == pytest.approx([-2, -3, -12])


def test_overlong_uses_sampled_tokens():
    shaping = RewardShaping(overlong_max_length=2, overlong_buffer=1)
    scores, _, metrics = shape_scores(torch.ones(3), batch(), shaping)
    assert scores.tolist() == [0, 1, 1]
    assert metrics["overlong_penalty"].value == pytest.approx(-1 / 3)


def test_truncated_rows():
    rows = batch(truncated=torch.tensor([True, False, False]))
    scores, same, metrics = shape_scores(torch.ones(3), rows, RewardShaping(truncation_penalty=0.5))
    assert scores.tolist() == [0.5, 1, 1]
    assert same.response_mask is MASK
    assert metrics["truncated"].value == pytest.approx(1 / 3)
    scores, _, _ = shape_scores(torch.full((3,), 2.0), rows, RewardShaping(truncation_factor=0.25))
    assert scores.tolist() == [0.5, 2, 2]
    scores, cut, _ = shape_scores(torch.ones(3), rows, RewardShaping(truncation_score=-1.0, mask_truncated=True))
    assert scores.tolist() == [-1, 1, 1]
    assert cut.response_mask.tolist() == [[False] * 4, *MASK[1:].tolist()]


def test_truncation_without_its_column_is_an_error():
    with pytest.raises(KeyError, match="truncated"):
        shape_scores(torch.ones(3), batch(), RewardShaping(truncation_penalty=1.0))


def test_normalise_then_clip():
    shaping = RewardShaping(normalize=True, clip=(-1.0, 0.5))
    scores, _, metrics = shape_scores(torch.tensor([0.0, 0.0, 3.0]), batch(), shaping)
    assert scores.tolist() == pytest.approx([-(0.5**0.5), -(0.5**0.5), 0.5])
    assert metrics["score_clipped"].value == pytest.approx(1 / 3)
    equal, _, _ = shape_scores(torch.ones(3), batch(), RewardShaping(normalize=True))
    assert equal.tolist() == [0, 0, 0]


def test_refused_settings():
    with pytest.raises(ConfigError, match="low < high"):
        RewardShaping(clip=(1.0, 1.0))
    with pytest.raises(ConfigError, match="overlong_buffer"):
        RewardShaping(overlong_max_length=10)
