import math

import pytest
import torch
from rlhf_algos.losses.online.clipped import PPOClipConfig
from rlhf_algos.losses.online.terms import (
    add_aux_loss,
    finish_policy_loss,
    policy_log_ratios,
    policy_mask,
    sequence_log_ratio,
    token_advantages,
)
from rlhf_core import Batch, ConfigError, LossTerms, ModelOutputs

MASK = torch.tensor([[False, True, True], [False, True, False]])


def rows(**columns):
    return Batch(
        token_ids=torch.ones(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
        response_mask=MASK,
        columns=columns,
    )


def test_log_ratios_are_clamped_and_masked():
    outputs = ModelOutputs(log_probs=torch.tensor([[5.0, -1.0, -50.0], [5.0, -1.0, 5.0]]))
    got = policy_log_ratios(outputs, rows(old_log_probs=torch.full((2, 3), -2.0)), 20.0)
    assert got.tolist() == [[0, 1, -20], [0, 1, 0]]
    free = policy_log_ratios(outputs, rows(old_log_probs=torch.full((2, 3), -2.0)), math.inf)
    assert free[0, 2] == -48
    with pytest.raises(ConfigError, match="log_probs"):
        policy_log_ratios(ModelOutputs(), rows(), 20.0)


def test_pretraining_rows_are_no_policy_rows():
    batch = rows(ptx_coef=torch.tensor([0.0, 0.5]), advantages=torch.tensor([2.0, 3.0]))
    assert policy_mask(batch).tolist() == [[False, True, True], [False, False, False]]
    assert token_advantages(batch).tolist() == [[0, 2, 2], [0, 0, 0]]


def test_sequence_log_ratio_is_a_mean():
    assert sequence_log_ratio(torch.tensor([[9.0, 1.0, 2.0], [9, 4, 9]]), MASK).tolist() == [[1.5], [4.0]]


def test_terms_add_up():
    log_probs = torch.full((2, 3), -1.0)
    outputs = ModelOutputs(log_probs=log_probs, entropy=torch.full((2, 3), 0.5), aux_loss=torch.tensor(2.0))
    batch = rows(ref_log_probs=torch.full((2, 3), -3.0))
    config = PPOClipConfig(kl_coef=0.1, kl_estimator="k1", entropy_coef=0.2, aux_loss_coef=0.3)
    terms = finish_policy_loss(torch.ones(2, 3), outputs, batch, config, {})
    assert float(terms.total / terms.weight) == pytest.approx(1 + 0.1 * 2 - 0.2 * 0.5 + 0.3 * 2)
    assert terms.metrics["kl"].value == pytest.approx(2.0)


def test_off_policy_sequence_masking():
    """Row 0 fell by 0.5 nats per token, row 1 by 2; only a negative advantage takes a response out of the loss."""
    outputs = ModelOutputs(log_probs=torch.tensor([[9.0, -1.5, -1.5], [9.0, -3.0, 9.0]]))
    for advantages, total in (([-1.0, -1.0], 2.0), ([1.0, 1.0], 3.0), ([-1.0, 1.0], 3.0)):
        batch = rows(
            old_log_probs=torch.full((2, 3), -1.5),
            rollout_log_probs=torch.tensor([[9.0, -1.0, -1.0], [9.0, -1.0, 9.0]]),
            advantages=torch.tensor(advantages),
        )
        terms = finish_policy_loss(torch.ones(2, 3), outputs, batch, PPOClipConfig(sequence_kl_limit=1.0), {})
        assert float(terms.total) == pytest.approx(total)
        assert float(terms.weight) == 3
    assert terms.metrics["sequence_masked"].value == 0
    unknown = batch.with_columns(
        rollout_log_probs=torch.full((2, 3), math.nan), advantages=torch.tensor([-1.0, -1.0])
    )
    terms = finish_policy_loss(torch.ones(2, 3), outputs, unknown, PPOClipConfig(sequence_kl_limit=1.0), {})
    assert float(terms.total) == pytest.approx(3.0)


def test_only_the_tokens_of_highest_entropy():
    config = PPOClipConfig(top_entropy=0.5)
    entropy = torch.tensor([[9.0, 1.0, 2.0], [9.0, 3.0, 9.0]])
    batch = config.add_columns(rows(old_entropy=entropy))
    assert batch["entropy_selected"].int().tolist() == [[0, 0, 1], [0, 1, 0]]
    outputs = ModelOutputs(log_probs=torch.zeros(2, 3))
    terms = finish_policy_loss(torch.tensor([[9.0, 1.0, 10.0], [9.0, 100.0, 9.0]]), outputs, batch, config, {})
    assert float(terms.total) == 110
    assert float(terms.weight) == 3
    with pytest.raises(ConfigError, match="add_columns"):
        finish_policy_loss(torch.ones(2, 3), outputs, rows(), config, {})
    with pytest.raises(ConfigError, match="top_entropy"):
        PPOClipConfig(top_entropy=0.0)


def test_no_router_loss_no_change():
    terms = LossTerms(total=torch.tensor(1.0), weight=torch.tensor(2.0))
    assert add_aux_loss(terms, ModelOutputs(), 0.0) is terms
