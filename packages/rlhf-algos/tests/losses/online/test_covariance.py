import math

import pytest
import torch
from rlhf_algos.losses.online.covariance import ClipCovConfig, KLCovConfig, clip_cov, kl_cov, token_covariance
from rlhf_algos.recipes.grpo import GRPO
from rlhf_core import Batch, ConfigError, ModelOutputs

MASK = torch.tensor([[False, True, True], [False, True, True]])
OLD = torch.tensor([[0.0, -1.0, -3.0], [0.0, -2.0, -2.0]])
ADVANTAGES = torch.tensor([[9.0, 2.0, 1.0], [9.0, -3.0, 0.0]])
# centred: log-probs 1, -1, 0, 0; advantages 2, 1, -3, 0; covariance 2, -1, 0, 0


def batch(**columns):
    return Batch(
        token_ids=torch.zeros(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
        response_mask=MASK,
        columns={"old_log_probs": OLD, "advantages": ADVANTAGES, **columns},
    )


def test_covariance_by_hand():
    assert token_covariance(ADVANTAGES, OLD, MASK).tolist() == [[0, 2, -1], [0, 0, 0]]


def test_kl_cov_penalises_the_largest():
    config = KLCovConfig(fraction=0.25, penalty_coef=0.5)
    ready = config.add_columns(batch())
    assert ready["cov_selected"].tolist() == [[False, True, False], [False, False, False]]
    terms = kl_cov(ModelOutputs(log_probs=OLD + math.log(2)), ready, config)
    assert float(terms.total) == pytest.approx(0.0 * 2 + 0.5 * math.log(2))  # advantages sum to 0
    assert terms.metrics["cov_selected"].value == 0.25


def test_clip_cov_removes_tokens_inside_the_bounds():
    config = ClipCovConfig(fraction=0.25, covariance_low=1.0, covariance_high=5.0)
    ready = config.add_columns(batch())
    assert ready["cov_selected"].sum() == 1
    terms = clip_cov(ModelOutputs(log_probs=OLD), ready, config)
    assert float(terms.total) == pytest.approx(-(1 - 3))
    assert float(terms.weight) == 4
    none = ClipCovConfig(covariance_low=3.0, covariance_high=5.0).add_columns(batch())
    assert not none["cov_selected"].any()


def test_the_draw_is_repeatable():
    config = ClipCovConfig(fraction=0.25, covariance_low=-9.0, covariance_high=9.0)
    first, second = (config.add_columns(batch())["cov_selected"] for _ in range(2))
    assert torch.equal(first, second)


def test_a_batch_without_counted_tokens():
    empty = Batch(
        token_ids=torch.zeros(2, 3, dtype=torch.long),
        attention_mask=MASK,
        response_mask=torch.zeros_like(MASK),
        columns={"old_log_probs": OLD, "advantages": ADVANTAGES},
    )
    for config in (KLCovConfig(), ClipCovConfig()):
        assert not config.add_columns(empty)["cov_selected"].any()


def test_recipes_add_the_column():
    columns = {"old_log_probs": OLD, "rollout_log_probs": OLD}
    rows = Batch(
        token_ids=torch.zeros(2, 3, dtype=torch.long), attention_mask=MASK, response_mask=MASK, columns=columns
    )
    ready, _ = GRPO(loss="kl_cov").prepare(rows, torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), 0.0)
    assert ready["cov_selected"].sum() == 1


def test_refusals():
    with pytest.raises(ConfigError, match="add_columns"):
        kl_cov(ModelOutputs(log_probs=OLD), batch(), KLCovConfig())
    with pytest.raises(ConfigError, match="fraction"):
        KLCovConfig(fraction=0.0)
    with pytest.raises(ConfigError, match="covariance_low"):
        ClipCovConfig(covariance_low=2.0, covariance_high=1.0)
