import math

import pytest
import torch
from rlhf_algos.losses.offline.kto import (
    KTOConfig,
    balanced_weights,
    bco_shift,
    kl_baseline,
    kto,
    mismatched_rows,
    opposite_baselines,
    with_kl_baseline,
)
from rlhf_core import Batch, ConfigError, ModelOutputs


def s(x):
    return 1 / (1 + math.exp(-x))


def batch():
    return Batch(
        token_ids=torch.tensor([[1, 2, 10, 11], [3, 20, 0, 0], [4, 5, 6, 30]]),
        attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool(),
        response_mask=torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 1]]).bool(),
        columns={
            "desirable": torch.tensor([True, False, True]),
            "ref_log_probs_sum": torch.tensor([-2.0, -1.0, -0.5]),
        },
        sample_ids=("a", "b", "c"),
    )


LOG_PROBS = torch.tensor([[0, 0, -1.0, -0.5], [0, -0.7, 0, 0], [0, 0, 0, -1.5]])
# log-ratios: 0.5, 0.3, -1.0


def test_by_hand():
    config = KTOConfig(beta=2.0, desirable_weight=3.0, undesirable_weight=0.5)
    terms = kto(ModelOutputs(log_probs=LOG_PROBS), with_kl_baseline(batch(), 0.2), config)
    expected = 3 * (1 - s(2 * 0.3)) + 0.5 * (1 - s(2 * -0.1)) + 3 * (1 - s(2 * -1.2))
    assert float(terms.total) == pytest.approx(expected)
    assert float(terms.weight) == 3
    assert terms.metrics["rewards_desirable"].value == pytest.approx(2 * (0.5 - 1.0) / 2)
    assert terms.metrics["rewards_undesirable"].value == pytest.approx(0.6)
    assert terms.metrics["kl_baseline"].value == pytest.approx(0.2)


def test_bco_by_hand():
    """beta h is 1, 0.6 and -2; delta is their mean."""
    delta = bco_shift(torch.tensor([0.5, 0.3, -1.0]), 2.0)
    assert delta == pytest.approx(-0.4 / 3)
    rows = batch().with_columns(reward_shift=torch.full((3,), delta))
    config = KTOConfig(loss="bco", beta=2.0, undesirable_weight=0.5)
    terms = kto(ModelOutputs(log_probs=LOG_PROBS), rows, config)
    expected = -math.log(s(1 - delta)) - 0.5 * math.log(s(delta - 0.6)) - math.log(s(-2 - delta))
    assert float(terms.total) == pytest.approx(expected, rel=1e-5)
    assert bco_shift(torch.zeros(0), 1.0) == 0.0


def test_what_each_loss_needs_of_the_batch():
    for options, baseline, partners in (
        ({}, True, True),
        ({"baseline": "opposite"}, True, False),
        ({"loss": "bco"}, False, False),
        ({"loss": "apo_zero"}, False, False),
    ):
        config = KTOConfig(**options)
        assert (config.needs_kl_baseline, config.needs_partners) == (baseline, partners)


def test_apo_zero_needs_no_baseline():
    terms = kto(ModelOutputs(log_probs=LOG_PROBS), batch(), KTOConfig(beta=1.0, loss="apo_zero"))
    assert float(terms.total) == pytest.approx(1 - s(0.5) + s(0.3) + 1 - s(-1.0))


def test_missing_baseline_says_what_to_do():
    with pytest.raises(ConfigError, match="with_kl_baseline"):
        kto(ModelOutputs(log_probs=LOG_PROBS), batch(), KTOConfig())


def test_gradient_raises_desirable_and_lowers_undesirable():
    log_probs = LOG_PROBS.clone().requires_grad_()
    kto(ModelOutputs(log_probs=log_probs), with_kl_baseline(batch(), 0.0), KTOConfig()).total.backward()
    assert (log_probs.grad[[0, 2]] <= 0).all()
    assert float(log_probs.grad[1, 1]) > 0


@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_extreme_log_ratios(gap):
    log_probs = (LOG_PROBS + gap * batch().response_mask).requires_grad_()
    terms = kto(ModelOutputs(log_probs=log_probs), with_kl_baseline(batch(), 0.0), KTOConfig(beta=1.0))
    terms.total.backward()
    assert math.isfinite(float(terms.total.detach()))
    assert torch.isfinite(log_probs.grad).all()


def test_mismatched_rows():
    got = mismatched_rows(batch(), pad_token_id=0)
    assert got.token_ids.tolist() == [[1, 2, 30, 0], [3, 10, 11, 0], [4, 5, 6, 20]]
    assert got.attention_mask.tolist() == [[True] * 3 + [False], [True] * 3 + [False], [True] * 4]
    assert got.response_mask.tolist() == [
        [False, False, True, False],
        [False, True, True, False],
        [False, False, False, True],
    ]


def test_mismatched_rows_with_an_empty_response():
    rows = batch()
    mask = rows.response_mask.clone()
    mask[1] = False
    empty = Batch(token_ids=rows.token_ids, attention_mask=rows.attention_mask, response_mask=mask)
    got = mismatched_rows(empty)
    assert got.token_ids.tolist()[1] == [3, 20, 10, 11]
    assert not got.response_mask[2].any()


def test_kl_baseline_is_a_clamped_mean():
    assert kl_baseline(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -2.5])) == pytest.approx(0.75)
    assert kl_baseline(torch.tensor([-3.0]), torch.tensor([-1.0])) == 0.0
    assert kl_baseline(torch.zeros(0), torch.zeros(0)) == 0.0


def test_opposite_baselines():
    got = opposite_baselines(torch.tensor([1.0, 2.0, 4.0, -9.0]), torch.tensor([True, True, False, False]))
    assert got.tolist() == [0.0, 0.0, 1.5, 1.5]
    one_kind = opposite_baselines(torch.tensor([1.0]), torch.tensor([True]))
    assert one_kind.tolist() == [0.0]


def test_balanced_weights_fulfil_equation_8():
    up, down = balanced_weights(30, 100, ratio=1.2)
    assert up * 30 == pytest.approx(1.2 * down * 100)
    with pytest.raises(ConfigError, match="SFT"):
        balanced_weights(0, 5)


def test_refused_settings():
    with pytest.raises(ConfigError, match="apo_zero"):
        KTOConfig(loss="bca")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="beta"):
        KTOConfig(beta=-1.0)
