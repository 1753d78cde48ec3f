import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_algos.advantages.registry import make_advantage
from rlhf_core import Batch, ConfigError

SCORES = torch.tensor([1.0, 5.0, 3.0, 7.0], dtype=torch.float64)
IDS = torch.tensor([4, 9, 4, 9])


def batch(lengths, **columns):
    mask = torch.arange(max([*lengths, 1])) < torch.tensor(lengths)[:, None]
    return Batch(token_ids=mask.long(), attention_mask=mask, response_mask=mask, columns=columns)


def advantages(name, scores, ids, lengths=None, columns=None, **options):
    rows = batch(lengths or [1] * len(scores), **(columns or {}))
    return make_advantage(name, options)(torch.as_tensor(scores), torch.as_tensor(ids), rows)


def test_grpo_by_hand():
    std = 2**0.5
    got = advantages("grpo", SCORES, IDS, eps=0.5)
    assert got.tolist() == pytest.approx([-1 / (std + 0.5), -1 / (std + 0.5), 1 / (std + 0.5), 1 / (std + 0.5)])
    assert advantages("grpo", SCORES, IDS, unbiased=False, eps=0).tolist() == pytest.approx([-1, -1, 1, 1])
    assert advantages("grpo", SCORES, IDS, scale="none").tolist() == [-1, -1, 1, 1]
    assert advantages("grpo", SCORES, IDS, scale="batch", eps=0).tolist() == pytest.approx(
        [x / float(SCORES.std()) for x in (-1, -1, 1, 1)]
    )
    centred = advantages("grpo", SCORES, IDS, scale="advantages", eps=0, unbiased=False)
    assert centred.tolist() == pytest.approx([-1, -1, 1, 1])  # the centred scores are -1, -1, 1, 1 themselves


@pytest.mark.parametrize("scale", ["group", "batch", "advantages", "none"])
def test_equal_scores_and_lone_rows_give_zero(scale):
    equal = advantages("grpo", [0.1, 0.1, 0.1], [0, 0, 0], scale=scale)
    assert equal.abs().max() < 1e-2
    assert advantages("grpo", [3.0], [7], scale=scale).tolist() == [0.0]


def test_lone_row_as_in_verl_keeps_its_score():
    assert advantages("grpo", [3.0], [7], eps=0.5, singleton="score").tolist() == pytest.approx([3 / 1.5])
    assert advantages("rloo", [3.0], [7], singleton="score").tolist() == [3.0]
    assert advantages("opo", [3.0], [7], lengths=[2], singleton="score").tolist() == [3]


def test_rloo_is_the_leave_one_out_baseline():
    got = advantages("rloo", [1.0, 2.0, 6.0, 4.0], [0, 0, 0, 1])
    assert got.tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, 0])


def test_opo_weights_the_baseline_by_length():
    assert advantages("opo", [1.0, 4.0], [0, 0], lengths=[1, 2]).tolist() == pytest.approx([1 - 3, 4 - 3])
    assert torch.isfinite(advantages("opo", [1.0, 4.0], [0, 0], lengths=[0, 0])).all()


def test_remax():
    greedy = {"greedy_scores": torch.tensor([0.25])}
    assert advantages("remax", [1.0], [0], columns=greedy).tolist() == [0.75]


def test_unknown_choices():
    with pytest.raises(ConfigError, match="zero, score"):
        advantages("grpo", SCORES, IDS, singleton="one")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=12), st.randoms())
def test_order_of_rows_does_not_matter(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    ids, scores = torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows], dtype=torch.float64)
    for name in ("grpo", "rloo", "opo"):
        torch.testing.assert_close(
            advantages(name, scores, ids)[order], advantages(name, scores[order], ids[order])
        )
