import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_algos.advantages.groups import (
    grpo_advantages,
    opo_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlhf_core import ConfigError

SCORES = torch.tensor([1.0, 5.0, 3.0, 7.0], dtype=torch.float64)
IDS = torch.tensor([4, 9, 4, 9])


def test_grpo_by_hand():
    std = 2**0.5
    got = grpo_advantages(SCORES, IDS, eps=0.5)
    assert got.tolist() == pytest.approx([-1 / (std + 0.5), -1 / (std + 0.5), 1 / (std + 0.5), 1 / (std + 0.5)])
    assert grpo_advantages(SCORES, IDS, unbiased=False, eps=0).tolist() == pytest.approx([-1, -1, 1, 1])
    assert grpo_advantages(SCORES, IDS, scale="none").tolist() == [-1, -1, 1, 1]
    assert grpo_advantages(SCORES, IDS, scale="batch", eps=0).tolist() == pytest.approx(
        [x / float(SCORES.std()) for x in (-1, -1, 1, 1)]
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_scores_and_lone_rows_give_zero(scale):
    equal = grpo_advantages(torch.tensor([0.1, 0.1, 0.1]), torch.zeros(3, dtype=torch.long), scale=scale)
    assert equal.abs().max() < 1e-2
    lone = grpo_advantages(torch.tensor([3.0]), torch.tensor([7]), scale=scale)
    assert lone.tolist() == [0.0]


def test_lone_row_as_in_verl_keeps_its_score():
    got = grpo_advantages(torch.tensor([3.0]), torch.tensor([7]), eps=0.5, singleton="score")
    assert got.tolist() == pytest.approx([3 / 1.5])
    assert rloo_advantages(torch.tensor([3.0]), torch.tensor([7]), singleton="score").tolist() == [3.0]
    assert opo_advantages(
        torch.tensor([3.0]), torch.tensor([7]), torch.tensor([2]), singleton="score"
    ).tolist() == [3]


def test_rloo_is_the_leave_one_out_baseline():
    scores, ids = torch.tensor([1.0, 2.0, 6.0, 4.0]), torch.tensor([0, 0, 0, 1])
    assert rloo_advantages(scores, ids).tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, 0])


def test_opo_weights_the_baseline_by_length():
    got = opo_advantages(torch.tensor([1.0, 4.0]), torch.tensor([0, 0]), torch.tensor([1, 2]))
    assert got.tolist() == pytest.approx([1 - 3, 4 - 3])
    empty = opo_advantages(torch.tensor([1.0, 4.0]), torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert torch.isfinite(empty).all()


def test_remax():
    assert remax_advantages(torch.tensor([1.0]), torch.tensor([0.25])).tolist() == [0.75]


def test_unknown_choices():
    with pytest.raises(ConfigError, match="group, batch, none"):
        grpo_advantages(SCORES, IDS, scale="std")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="zero, score"):
        grpo_advantages(SCORES, IDS, singleton="one")  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=12), st.randoms())
def test_order_of_rows_does_not_matter(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    ids, scores = torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows], dtype=torch.float64)
    for f in (grpo_advantages, rloo_advantages):
        torch.testing.assert_close(f(scores, ids)[order], f(scores[order], ids[order]))
