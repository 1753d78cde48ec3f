import math

import pytest
import torch
from rlhf_algos.losses.offline.pairwise import PAIR_LOSSES, PairLossSettings, aot_losses, aot_partners
from rlhf_core import Batch, ConfigError

C, R, BETA, EPS, TAU = 0.7, -0.4, 0.5, 0.1, 0.05
D = C - R


def s(x):
    return 1 / (1 + math.exp(-x))


def ls(x):
    return math.log(s(x))


EXPECTED = {
    "sigmoid": -0.9 * ls(BETA * D) - 0.1 * ls(-BETA * D),
    "hinge": 1 - BETA * D,
    "ipo": (D - 1) ** 2,
    "robust": (-0.9 * ls(BETA * D) + 0.1 * ls(-BETA * D)) / 0.8,
    "exo": s(BETA * D) * (ls(BETA * D) - math.log(0.9)) + s(-BETA * D) * (ls(-BETA * D) - math.log(0.1)),
    "nca": -ls(BETA * C) - ls(-BETA * C) / 2 - ls(-BETA * R) / 2,
    "bco": -ls(BETA * C) - ls(-BETA * R),
    "sppo": (C - 1) ** 2 + (R + 1) ** 2,
    "apo_zero": 1 - s(BETA * C) + s(BETA * R),
    "apo_down": s(BETA * C) + 1 - s(BETA * D),
    "discopop": -ls(BETA * D) * (1 - s(BETA * D / TAU)) + math.exp(-BETA * D) * s(BETA * D / TAU),
}


def tensors(c=C, r=R):
    return torch.tensor([c], dtype=torch.float64), torch.tensor([r], dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
def test_by_hand(name):
    got = PAIR_LOSSES[name](*tensors(), PairLossSettings(beta=BETA, label_smoothing=EPS, tau=TAU))
    assert float(got) == pytest.approx(EXPECTED[name])


def test_bco_shift():
    settings = PairLossSettings(beta=BETA, shift=torch.tensor([0.2]))
    expected = -ls(BETA * C - 0.2) - ls(0.2 - BETA * R)
    assert float(PAIR_LOSSES["bco"](*tensors(), settings)) == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(set(PAIR_LOSSES) - {"nca", "apo_down", "sppo", "discopop"}))
def test_gradient_prefers_the_chosen(name):
    """Near the start, where policy and reference agree (the left-out ones do not, by design)."""
    chosen, rejected = (x.requires_grad_() for x in tensors(0.01, 0.0))
    PAIR_LOSSES[name](chosen, rejected, PairLossSettings(beta=BETA, label_smoothing=EPS)).sum().backward()
    assert float(chosen.grad) < 0 < float(rejected.grad)


@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_extreme_gaps_stay_finite(name, gap):
    chosen = torch.tensor([gap], requires_grad=True)
    loss = PAIR_LOSSES[name](chosen, torch.zeros(1), PairLossSettings(beta=1.0, label_smoothing=EPS)).sum()
    if name == "discopop" and gap < 0:
        # sigmoid(beta d / tau) is 0 here, so the exponential vanishes and the logistic part remains.
        assert float(loss.detach()) == pytest.approx(100.0)
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert math.isfinite(float(chosen.grad))


@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
def test_gradcheck(name):
    settings = PairLossSettings(beta=BETA, label_smoothing=EPS)
    chosen, rejected = (x.requires_grad_() for x in tensors())
    assert torch.autograd.gradcheck(lambda c, r: PAIR_LOSSES[name](c, r, settings), (chosen, rejected))


def pairs(**columns):
    rows = len(next(iter(columns.values())))
    ones = torch.ones(rows, 2, dtype=torch.bool)
    return Batch(
        token_ids=torch.zeros(rows, 2, dtype=torch.long),
        attention_mask=ones,
        response_mask=ones,
        columns=columns,
        rows_per_unit=2,
    )


@pytest.mark.parametrize("paired", [True, False])
def test_aot_equals_the_loss_on_sorted_scores_with_its_gradient(paired):
    """Whole-batch sorting, done here directly, against the column that lets rows be treated one by one."""
    torch.manual_seed(0)
    policy = torch.randn(8, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(8, dtype=torch.float64)
    settings = PairLossSettings(beta=0.3, label_smoothing=0.1)

    if paired:
        left = (policy[0::2] - policy[1::2]).sort().values
        right = (reference[0::2] - reference[1::2]).sort().values
    else:
        left, right = ((policy - reference)[start::2].sort().values for start in (0, 1))
    logits = 0.3 * (left - right)
    direct = (-0.9 * torch.nn.functional.logsigmoid(logits) - 0.1 * torch.nn.functional.logsigmoid(-logits)).sum()
    (expected,) = torch.autograd.grad(direct, policy)

    partner = aot_partners(policy.detach(), reference, paired=paired)
    batch = pairs(aot_partner=partner, ref_log_probs_sum=reference)
    log_ratio = policy - reference
    losses = aot_losses(log_ratio[0::2], log_ratio[1::2], batch, settings, paired=paired)
    torch.testing.assert_close(losses.sum(), direct)
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), policy)[0], expected)


def test_aot_without_its_column():
    with pytest.raises(ConfigError, match="aot_partners"):
        aot_losses(torch.zeros(1), torch.zeros(1), pairs(x=torch.zeros(2)), PairLossSettings(), paired=True)
