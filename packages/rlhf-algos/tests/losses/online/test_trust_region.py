import math

import pytest
import torch
from rlhf_algos.losses.online.trust_region import DPPOConfig, dppo
from rlhf_core import Batch, ConfigError, ModelOutputs

OLD = torch.tensor([[0.5, 0.5, 0.01, 0.01]], dtype=torch.float64).log()
NEW = torch.tensor([[0.75, 0.25, 0.03, 0.02]], dtype=torch.float64).log()


def run(advantages, **options):
    mask = torch.ones(1, 4, dtype=torch.bool)
    batch = Batch(
        token_ids=mask.long(),
        attention_mask=mask,
        response_mask=mask,
        columns={"old_log_probs": OLD, "advantages": torch.tensor([advantages], dtype=torch.float64)},
    )
    log_probs = NEW.clone().requires_grad_()
    terms = dppo(ModelOutputs(log_probs=log_probs), batch, DPPOConfig(**options))
    terms.total.backward()
    return terms, log_probs.grad[0]


def test_a_tripled_rare_token_stays_a_likely_one_that_moved_goes():
    """Ratios 1.5, 0.5, 3, 2; moved by 0.25, -0.25, 0.02, 0.01."""
    terms, gradient = run([1.0, 1.0, 1.0, -1.0], limit_low=0.2)
    assert float(terms.total.detach()) == pytest.approx(-0.5 - 3 + 2)
    assert gradient.tolist() == pytest.approx([0, -0.5, -3, 2])
    assert terms.metrics["clip_fraction"].value == pytest.approx(0.25)
    assert float(terms.weight) == 4


def test_only_steps_further_away_are_left_out():
    _, gradient = run([-1.0, -1.0, 1.0, 1.0], limit_low=0.2)
    assert gradient.tolist() == pytest.approx([1.5, 0, -3, -2])  # the first one may come back
    _, gradient = run([-1.0, -1.0, 1.0, 1.0], limit_low=0.2, symmetric=True)
    assert gradient.tolist() == pytest.approx([0, 0, -3, -2])
    _, gradient = run([1.0, -1.0, 1.0, 1.0], limit_low=0.2, limit_high=0.3)
    assert gradient.tolist() == pytest.approx([-1.5, 0, -3, -2])


def test_binary_kl():
    """KL of (0.5, 0.5) from (0.75, 0.25) is log(4/3) / 2 = 0.1438, the same from (0.25, 0.75)."""
    exact = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    for limit, first in ((exact * 0.99, 0.0), (exact * 1.01, -1.5)):
        _, gradient = run([1.0, 1.0, 1.0, 1.0], divergence="kl", limit_low=limit)
        assert float(gradient[0]) == pytest.approx(first)


def test_the_ratios_bound_keeps_the_gradient():
    _, gradient = run([1.0, 1.0, 1.0, 1.0], limit_low=1.0, ratio_high=1.5)
    assert gradient.tolist() == pytest.approx([-1.5, -0.5, -1.5, -1.5])


def test_the_penalty_on_log_ratios_is_on_all_tokens():
    terms, gradient = run([1.0, 0.0, 0.0, 0.0], limit_low=0.2, log_ratio_coef=0.5)
    logs = [math.log(r) for r in (1.5, 0.5, 3.0, 2.0)]
    assert float(terms.total.detach()) == pytest.approx(0.5 * sum(x * x for x in logs))
    assert gradient.tolist() == pytest.approx(logs)


def test_refused():
    with pytest.raises(ConfigError, match="tv, kl"):
        DPPOConfig(divergence="js")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit_low"):
        DPPOConfig(limit_low=0.0)
