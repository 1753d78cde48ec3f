import math

import pytest
import torch
from rlhf_algos.kl import AdaptiveKL, FixedKL, full_kl, kl_estimate
from rlhf_core import ConfigError


def test_estimators_by_hand():
    p, q = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    assert kl_estimate(p, q, "k1").tolist() == [1.0, -1.0]
    assert kl_estimate(p, q, "abs").tolist() == [1.0, 1.0]
    assert kl_estimate(p, q, "k2").tolist() == [0.5, 0.5]
    assert kl_estimate(p, q, "k3").tolist() == pytest.approx([math.exp(-1), math.e - 2], abs=1e-6)


def test_k1_and_k3_are_unbiased_for_the_full_kl():
    torch.manual_seed(0)
    logits, ref = torch.randn(2, 9, dtype=torch.float64)
    p, q = logits.log_softmax(0), ref.log_softmax(0)
    exact = float(full_kl(logits, ref))
    assert exact == pytest.approx(float((p.exp() * (p - q)).sum()))
    for kind in ("k1", "k3"):
        assert float((p.exp() * kl_estimate(p, q, kind)).sum()) == pytest.approx(exact)


def test_full_kl_of_excluded_tokens_is_finite():
    logits = torch.tensor([0.0, 0.0, -math.inf])
    assert float(full_kl(logits, logits)) == 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_extreme_gaps_stay_finite(kind, gap):
    p = torch.tensor(0.0, requires_grad=True)
    value = kl_estimate(p, torch.tensor(gap), kind)
    value.backward()
    assert math.isfinite(float(value.detach()))
    assert math.isfinite(float(p.grad))


def test_k2_gradient_keeps_the_value():
    p = torch.tensor(-1.0, requires_grad=True)
    value = kl_estimate(p, torch.tensor(-3.0), "k3", gradient="k2")
    value.backward()
    assert float(value.detach()) == pytest.approx(math.exp(-2) + 1)
    assert float(p.grad) == pytest.approx(2.0)


def test_value_limit():
    assert float(kl_estimate(torch.tensor(0.0), torch.tensor(50.0), "k3", value_limit=10)) == 10


def test_unknown_estimator():
    with pytest.raises(ConfigError, match="k1, k2, k3, abs"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def test_adaptive_controller_moves_and_resumes():
    controller = AdaptiveKL(0.1, target=1.0, horizon=100)
    controller.update(1.1, 10)
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    controller.update(50.0, 10)  # the error is clipped at 0.2
    assert controller.value == pytest.approx(0.101 * 1.02)
    controller.update(math.nan, 10)
    other = AdaptiveKL(0.5, target=1.0, horizon=100)
    other.load_state_dict(controller.state_dict())
    assert other.value == controller.value == pytest.approx(0.101 * 1.02)
    with pytest.raises(ConfigError, match="positive"):
        AdaptiveKL(0.1, target=0.0)


def test_fixed_controller_stays():
    controller = FixedKL(0.3)
    controller.update(100.0, 10)
    controller.load_state_dict({"value": 9.0})
    assert controller.value == 0.3
    assert controller.state_dict() == {"value": 0.3}
