import math

import pytest
import torch
from rlhf_algos.losses.online.sequence import GMPOConfig, GSPOConfig, VESPOConfig, gmpo, gspo, vespo
from rlhf_core import Batch, ConfigError, ModelOutputs

MASK = torch.tensor([[False, True, True], [False, True, False]])
LOG_RATIO = torch.tensor([[0.0, 0.6, -0.2], [0.0, 0.5, 0.0]])


def run(function, config, advantages=(1.0, -2.0), requires_grad=False):
    log_probs = (LOG_RATIO - 1.0).requires_grad_(requires_grad)
    batch = Batch(
        token_ids=torch.zeros(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
        response_mask=MASK,
        columns={"old_log_probs": torch.full((2, 3), -1.0), "advantages": torch.tensor(advantages)},
    )
    return log_probs, function(ModelOutputs(log_probs=log_probs), batch, config)


def test_gspo_by_hand():
    _, terms = run(gspo, GSPOConfig(clip_range=0.1, clip_range_high=0.1))
    assert float(terms.total) == pytest.approx(-min(math.exp(0.2), 1.1) + 2 * math.exp(0.5))
    assert float(terms.weight) == 2
    assert terms.metrics["clip_fraction"].value == pytest.approx(2 / 3)


def test_token_form_has_the_value_and_gradient_of_the_sequence_form_for_equal_advantages():
    wide = {"clip_range": 0.9, "clip_range_high": 9.0}
    grads, values = [], []
    for token_form in (False, True):
        log_probs, terms = run(gspo, GSPOConfig(token_form=token_form, **wide), requires_grad=True)
        terms.total.backward()
        grads.append(log_probs.grad)
        values.append(terms.total.detach())
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(grads[0], grads[1])
    assert float(grads[0][0, 1]) == pytest.approx(-math.exp(0.2) / 2)


def test_vespo_by_hand():
    """Ratios of the responses exp(0.4) and exp(0.5); the weight is exp(k log w + lambda (1 - w))."""
    log_probs, terms = run(vespo, VESPOConfig(), requires_grad=True)
    first = math.exp(2 * 0.4 + 3 * (1 - math.exp(0.4)))
    second = math.exp(3 * 0.5 + 2 * (1 - math.exp(0.5)))
    assert float(terms.total.detach()) == pytest.approx(-first * (-0.4 - 1.2) + 2 * second * -0.5)
    terms.total.backward()
    assert log_probs.grad.tolist() == [pytest.approx([0, -first, -first]), pytest.approx([0, 2 * second, 0])]
    assert terms.metrics["sequence_weight"].value == pytest.approx((2 * first + second) / 3)


def test_vespo_takes_importance_weights_into_the_ratio():
    """Weights 2 and 1/2 in the first response cancel; a weight of 0 in the second one makes it 1e-8."""
    plain = run(vespo, VESPOConfig())[1]
    batch = Batch(
        token_ids=torch.zeros(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
        response_mask=MASK,
        columns={
            "old_log_probs": torch.full((2, 3), -1.0),
            "advantages": torch.tensor([1.0, -2.0]),
            "importance_weights": torch.tensor([[9.0, 2.0, 0.5], [9.0, 0.0, 9.0]]),
        },
    )
    weighted = vespo(ModelOutputs(log_probs=LOG_RATIO - 1.0), batch, VESPOConfig())
    tiny = math.exp(3 * math.log(1e-8) + 2 * (1 - 1e-8))
    second = math.exp(3 * 0.5 + 2 * (1 - math.exp(0.5)))
    assert float(weighted.total - plain.total) == pytest.approx(2 * (tiny - second) * -0.5)
    with pytest.raises(ConfigError, match="decay_negative"):
        VESPOConfig(decay_negative=0.0)


def test_gspo_dual_clip():
    _, terms = run(gspo, GSPOConfig(clip_range=0.1, clip_range_high=0.1, dual_clip=1.2))
    assert float(terms.total) == pytest.approx(-1.1 + 2 * 1.2)


def test_gmpo_by_hand():
    _, terms = run(gmpo, GMPOConfig(clip_range=0.4))
    # row 0: min(0.6, 0.4) and -0.2 (not clipped where A > 0); row 1: 0.5 (not clipped above where A < 0)
    assert float(terms.total) == pytest.approx(-math.exp((0.4 - 0.2) / 2) + 2 * math.exp(0.5))
    assert terms.metrics["clip_fraction"].value == pytest.approx(1 / 3)
    with pytest.raises(ConfigError, match="negative"):
        GMPOConfig(clip_range=-0.1)
