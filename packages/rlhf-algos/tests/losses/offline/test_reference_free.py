import math

import pytest
import torch
from rlhf_algos.losses.offline.preference import with_sft_divisor
from rlhf_algos.losses.offline.reference_free import (
    CPOConfig,
    ORPOConfig,
    SimPOConfig,
    TPOConfig,
    alpha_reward,
    cpo,
    log_odds,
    orpo,
    simpo,
    tpo,
)
from rlhf_core import Batch, ConfigError, DataError, ModelOutputs

MASK = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 0], [0, 1, 1]]).bool()
LOG_PROBS = torch.tensor([[0, -1.0, -0.5], [0, -2.0, 0], [0, -1.0, 0], [0, -0.5, -0.5]])
# sums: -1.5, -2, -1, -1; means: -0.75, -2, -1, -0.5


def batch():
    rows = Batch(
        token_ids=torch.zeros(4, 3, dtype=torch.long),
        attention_mask=torch.ones(4, 3, dtype=torch.bool),
        response_mask=MASK,
        rows_per_unit=2,
    )
    return with_sft_divisor(rows)


def run(function, config):
    return function(ModelOutputs(log_probs=LOG_PROBS), batch(), config)


def softplus(x):
    return math.log1p(math.exp(x))


def test_simpo_by_hand():
    terms = run(simpo, SimPOConfig(beta=2.0, gamma=0.5))
    assert float(terms.total) == pytest.approx(softplus(-(2 * 1.25 - 0.5)) + softplus(-(2 * -0.5 - 0.5)))
    assert terms.metrics["rewards_chosen"].value == pytest.approx(2 * (-0.75 - 1) / 2)
    assert float(terms.weight) == 2


def test_alpha_shapes_the_reward():
    """(1 - p^-alpha) / alpha of the mean probabilities exp(-0.75), exp(-2), exp(-1), exp(-0.5)."""
    r = [(1 - math.exp(0.5 * m)) / 0.5 for m in (0.75, 2, 1, 0.5)]
    terms = run(simpo, SimPOConfig(beta=2.0, gamma=0.5, alpha=0.5))
    expected = softplus(-(2 * (r[0] - r[1]) - 0.5)) + softplus(-(2 * (r[2] - r[3]) - 0.5))
    assert float(terms.total) == pytest.approx(expected, rel=1e-5)
    assert terms.metrics["rewards_chosen"].value == pytest.approx(2 * (r[0] + r[2]) / 2)
    m = torch.tensor([-1.0, -300.0])
    assert alpha_reward(m, 0.0) is m
    assert float(alpha_reward(m, 1e-6)[0]) == pytest.approx(-1.0, rel=1e-3)
    assert torch.isfinite(alpha_reward(m, 1.0)).all()


def test_tpo_by_hand():
    """A triple: sums -1.5, -2, -1 (chosen, rejected, gold); the gold response has one token."""
    rows = Batch(
        token_ids=torch.zeros(3, 3, dtype=torch.long),
        attention_mask=torch.ones(3, 3, dtype=torch.bool),
        response_mask=MASK[:3],
        rows_per_unit=3,
    )
    outputs = ModelOutputs(log_probs=LOG_PROBS[:3])
    terms = tpo(outputs, with_sft_divisor(rows, place=2), TPOConfig(beta=2.0, sft_coef=0.5))
    assert float(terms.total) == pytest.approx(softplus(-1.0) + 0.5 * 1.0)
    assert float(terms.weight) == 1
    mean = TPOConfig(beta=2.0, length_normalized=True, gamma=0.3, sft_coef=0.0)
    assert float(tpo(outputs, rows, mean).total) == pytest.approx(softplus(-(2 * 1.25 - 0.3)))
    with pytest.raises(DataError, match="rows_per_unit=3"):
        run(tpo, TPOConfig())


def test_cpo_by_hand():
    terms = run(cpo, CPOConfig(beta=0.5, sft_coef=2.0))
    assert float(terms.total) == pytest.approx(softplus(-0.25) + softplus(0.0) + 2 * (0.75 + 1.0))
    token = run(cpo, CPOConfig(beta=0.5, sft_mean="token"))
    assert float(token.total / token.weight) == pytest.approx((softplus(-0.25) + softplus(0.0)) / 2 + 2.5 / 3)
    hinge = run(cpo, CPOConfig(loss="hinge", beta=0.5, sft_coef=0.0))
    assert float(hinge.total) == pytest.approx(0.75 + 1.0)
    ipo = run(cpo, CPOConfig(loss="ipo", beta=0.5, sft_coef=0.0))
    assert float(ipo.total) == pytest.approx((1.25 - 1) ** 2 + (-0.5 - 1) ** 2)


def test_orpo_by_hand():
    def odds(log_p):
        return log_p - math.log(1 - math.exp(log_p))

    terms = run(orpo, ORPOConfig(beta=0.5, sft_mean="sequence"))
    gaps = odds(-0.75) - odds(-2), odds(-1) - odds(-0.5)
    expected = 0.5 * sum(softplus(-gap) for gap in gaps) + 0.75 + 1.0
    assert float(terms.total) == pytest.approx(expected)
    assert terms.metrics["log_odds_ratio"].value == pytest.approx(sum(gaps) / 2)


@pytest.mark.parametrize("log_p", [-1e-4, -0.5, -0.7, -5.0, -80.0])
def test_log_odds_and_its_gradient(log_p):
    x = torch.tensor(log_p, dtype=torch.float64, requires_grad=True)
    value = log_odds(x)
    value.backward()
    assert float(value.detach()) == pytest.approx(log_p - math.log(-math.expm1(log_p)))
    assert float(x.grad) == pytest.approx(1 - 1 / -math.expm1(-log_p), rel=1e-6)


def test_log_odds_of_certainty_is_finite():
    x = torch.zeros(1, requires_grad=True)
    log_odds(x).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_refused_settings():
    with pytest.raises(ConfigError, match="beta"):
        SimPOConfig(beta=0.0)
    with pytest.raises(ConfigError, match="label_smoothing"):
        CPOConfig(label_smoothing=0.7)
    with pytest.raises(ConfigError, match="sigmoid, hinge, ipo"):
        CPOConfig(loss="dpo")  # type: ignore[arg-type]
