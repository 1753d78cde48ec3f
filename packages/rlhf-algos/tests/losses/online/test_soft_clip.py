import math

import pytest
import torch
from rlhf_algos.losses.online.soft_clip import CISPOConfig, DROConfig, SAPOConfig, cispo, dro, sapo
from rlhf_core import Batch, ConfigError, ModelOutputs

MASK = torch.tensor([[False, True, True]])
RATIO = torch.tensor([[1.0, 1.5, 0.5]])
ADVANTAGES = torch.tensor([[0.0, 2.0, -1.0]])


def run(function, config):
    log_probs = (RATIO.log() - 1.0).requires_grad_()
    batch = Batch(
        token_ids=torch.zeros(1, 3, dtype=torch.long),
        attention_mask=torch.ones(1, 3, dtype=torch.bool),
        response_mask=MASK,
        columns={"old_log_probs": torch.full((1, 3), -1.0), "advantages": ADVANTAGES},
    )
    terms = function(ModelOutputs(log_probs=log_probs), batch, config)
    terms.total.backward()
    return log_probs, terms


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    log_probs, terms = run(cispo, CISPOConfig(ratio_low=0.8, ratio_high=1.2))
    expected = -(1.2 * 2 * (math.log(1.5) - 1) + 0.8 * -1 * (math.log(0.5) - 1))
    assert float(terms.total.detach()) == pytest.approx(expected, abs=1e-6)
    assert log_probs.grad[0].tolist() == pytest.approx([0, -2.4, 0.8])
    assert terms.metrics["clip_fraction"].value == 1.0


def test_sapo_by_hand():
    _, terms = run(sapo, SAPOConfig(temperature_positive=1.0, temperature_negative=2.0))

    def gate(ratio, tau):
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    assert float(terms.total.detach()) == pytest.approx((-2 * gate(1.5, 1.0) + gate(0.5, 2.0)) / 2)
    assert float(terms.weight) == 1


def test_sapo_slope_is_one_on_policy():
    log_probs = torch.zeros(1, 3, requires_grad=True)
    batch = Batch(
        token_ids=torch.zeros(1, 3, dtype=torch.long),
        attention_mask=torch.ones(1, 3, dtype=torch.bool),
        response_mask=MASK,
        columns={"old_log_probs": torch.zeros(1, 3), "advantages": ADVANTAGES},
    )
    sapo(ModelOutputs(log_probs=log_probs), batch, SAPOConfig(aggregation="token_mean")).total.backward()
    assert log_probs.grad[0].tolist() == pytest.approx([0, -2, 1])


def test_refused_settings():
    with pytest.raises(ConfigError, match="ratio_low"):
        CISPOConfig(ratio_low=2.0, ratio_high=1.0)
    with pytest.raises(ConfigError, match="temperatures"):
        SAPOConfig(temperature_positive=0.0)


def test_dro_draws_back_to_the_sampler():
    log_probs, terms = run(dro, DROConfig(beta=0.5))
    up, down = math.log(1.5), math.log(0.5)
    expected = -2 * (up - 1) + (down - 1) + 0.25 * (up**2 + down**2)
    assert float(terms.total.detach()) == pytest.approx(expected)
    assert log_probs.grad[0].tolist() == pytest.approx([0, -2 + 0.5 * up, 1 + 0.5 * down])
    with pytest.raises(ConfigError, match="beta must be positive"):
        DROConfig(beta=0)
