import math

import pytest
import torch
from rlhf_algos.losses.online.clipped import PPOClipConfig, ReinforceConfig, ppo_clip, reinforce
from rlhf_core import Batch, ConfigError, ModelOutputs

MASK = torch.tensor([[False, True, True, True], [False, True, False, False]])
RATIO = torch.tensor([[1.0, 1.5, 0.5, 1.0], [1.0, 1.5, 1.0, 1.0]])
ADVANTAGES = torch.tensor([[9.0, 2.0, -1.0, 1.0], [9.0, -1.0, 9.0, 9.0]])


def batch(**columns):
    columns = {"old_log_probs": torch.full((2, 4), -1.0), "advantages": ADVANTAGES, **columns}
    return Batch(
        token_ids=torch.zeros(2, 4, dtype=torch.long),
        attention_mask=torch.ones(2, 4, dtype=torch.bool),
        response_mask=MASK,
        columns=columns,
    )


def outputs(**fields):
    return ModelOutputs(log_probs=(RATIO.log() - 1.0).masked_fill(~MASK, 0), **fields)


def run(config=None, *, columns=None, **fields):
    return ppo_clip(outputs(**fields), batch(**(columns or {})), config or PPOClipConfig())


def test_ppo_clip_by_hand():
    terms = run()
    # min(1.5, 1.2) * 2, min(-0.5, -0.8), 1 * 1 and min(-1.5, -1.2)
    assert float(terms.total) == pytest.approx(-(2.4 - 0.8 + 1.0 - 1.5))
    assert float(terms.weight) == 4
    assert terms.metrics["clip_fraction"].value == pytest.approx(2 / 4)
    assert terms.metrics["ratio"].value == pytest.approx((1.5 + 0.5 + 1 + 1.5) / 4)
    assert terms.metrics["approx_kl"].value == pytest.approx(-(2 * math.log(1.5) + math.log(0.5)) / 4)
    assert terms.metrics["policy_loss"].value == pytest.approx(-1.1 / 4)


def test_clip_higher_and_dual_clip():
    terms = run(PPOClipConfig(clip_range=0.2, clip_range_high=0.3, dual_clip=1.25))
    assert float(terms.total) == pytest.approx(-(2.6 - 0.8 + 1.0 - 1.25))
    assert terms.metrics["dual_clip_fraction"].value == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("how", "total", "weight"),
    [("seq_mean_token_mean", -2.6 / 3 + 1.5, 2), ("seq_mean_token_sum", -1.1, 2), ("max_length", -1.1 / 8, 2)],
)
def test_aggregations(how, total, weight):
    terms = run(PPOClipConfig(aggregation=how, max_length=8))
    assert (float(terms.total), float(terms.weight)) == pytest.approx((total, weight))


def test_row_advantages_are_spread():
    terms = run(columns={"advantages": torch.tensor([1.0, -1.0])})
    assert float(terms.total) == pytest.approx(-(1.2 + 0.5 + 1.0 - 1.5))


def test_importance_weights_scale_the_policy_term_only():
    columns = {"importance_weights": torch.zeros(2, 4), "ref_log_probs": torch.full((2, 4), -1.0)}
    terms = run(PPOClipConfig(kl_coef=0.5, kl_estimator="k2"), columns=columns)
    squares = 2 * math.log(1.5) ** 2 + math.log(0.5) ** 2
    assert float(terms.total) == pytest.approx(0.5 * squares / 2)
    assert terms.metrics["kl"].value == pytest.approx(squares / 8)


def test_kl_weighted_by_the_ratio():
    columns = {"advantages": torch.zeros(2), "ref_log_probs": torch.full((2, 4), -1.0)}
    terms = run(PPOClipConfig(kl_coef=1.0, kl_estimator="k1", kl_ratio_weighted=True), columns=columns)
    assert float(terms.total) == pytest.approx(2 * 1.5 * math.log(1.5) + 0.5 * math.log(0.5))


def test_entropy_bonus():
    entropy = torch.full((2, 4), 2.0)
    plain, bonus = run(entropy=entropy), run(PPOClipConfig(entropy_coef=0.1), entropy=entropy)
    assert float(bonus.total - plain.total) == pytest.approx(-0.1 * 2 * 4)
    assert plain.metrics["entropy"].value == 2.0
    with pytest.raises(ConfigError, match="entropy"):
        run(PPOClipConfig(entropy_coef=0.1))


def test_aux_loss_is_weighted_like_the_batch():
    plain, aux = run(), run(PPOClipConfig(aux_loss_coef=0.01), aux_loss=torch.tensor(3.0))
    assert float(aux.total - plain.total) == pytest.approx(0.01 * 3 * 4)
    assert aux.metrics["aux_loss"].value == pytest.approx(3.0)
    with pytest.raises(ConfigError, match="aux_loss"):
        run(PPOClipConfig(aux_loss_coef=0.01))


def test_without_old_log_probs_the_ratio_is_one_with_a_gradient():
    log_probs = torch.full((2, 4), -2.0, requires_grad=True)
    rows = batch()
    columns = {name: value for name, value in rows.columns.items() if name != "old_log_probs"}
    on_policy = Batch(
        token_ids=rows.token_ids, attention_mask=rows.attention_mask, response_mask=MASK, columns=columns
    )
    terms = ppo_clip(ModelOutputs(log_probs=log_probs), on_policy, PPOClipConfig())
    terms.total.backward()
    torch.testing.assert_close(log_probs.grad, -ADVANTAGES.masked_fill(~MASK, 0))


def test_gradient_raises_good_tokens_and_lowers_bad_ones():
    log_probs = torch.full((2, 4), -1.0, requires_grad=True)
    ppo_clip(ModelOutputs(log_probs=log_probs), batch(), PPOClipConfig()).total.backward()
    assert (log_probs.grad[MASK].sign() == -ADVANTAGES[MASK].sign()).all()
    assert not log_probs.grad[~MASK].any()


def test_reinforce_by_hand():
    terms = reinforce(outputs(), batch(), ReinforceConfig())
    log_probs = RATIO.log() - 1
    assert float(terms.total) == pytest.approx(float(-(ADVANTAGES * log_probs)[MASK].sum()))


def test_outputs_follow_the_config():
    assert PPOClipConfig().outputs == ("log_probs",)
    assert PPOClipConfig(entropy_coef=0.1, aux_loss_coef=0.1).outputs == ("log_probs", "entropy", "aux_loss")


@pytest.mark.parametrize(
    "bad",
    [
        {"clip_range": 1.5},
        {"clip_range_high": -0.1},
        {"dual_clip": 1.0},
        {"aggregation": "mean"},
        {"aggregation": "max_length"},
        {"log_ratio_limit": 0.0},
    ],
)
def test_refused_settings(bad):
    with pytest.raises(ConfigError):
        PPOClipConfig(**bad)
