from dataclasses import replace

import pytest
import torch
from rlhf_algos.losses.online.clipped import PPOClipConfig, ppo_clip
from rlhf_algos.losses.online.pretraining import mix_pretraining, with_likelihood
from rlhf_algos.recipes.named import make_recipe
from rlhf_core import Batch, ConfigError, Loss, ModelOutputs, RaggedBatch, accumulate


def rows(mask, **columns):
    mask = torch.tensor(mask).bool()
    return Batch(
        token_ids=torch.ones(mask.shape, dtype=torch.long),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        columns=columns,
    )


def mixed(config):
    policy = rows(
        [[0, 1, 1], [0, 1, 0]],
        advantages=torch.tensor([1.0, -1.0]),
        old_log_probs=torch.full((2, 3), -1.0),
        importance_weights=torch.full((2, 3), 2.0),
    )
    pretraining = rows([[0, 1, 1, 1], [0, 0, 0, 1]], labels=torch.zeros(2))
    return mix_pretraining(policy, pretraining, 0.5, config)


def forward(batch, fields):
    log_probs = torch.full(batch.token_ids.shape, -1.0).masked_fill(~batch.response_mask, 0).requires_grad_()
    entropy = torch.ones(batch.token_ids.shape) if "entropy" in fields else None
    return ModelOutputs(log_probs=log_probs, entropy=entropy)


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize("max_tokens", [4, 100])
def test_policy_mean_plus_coef_times_token_mean(how, max_tokens):
    config = PPOClipConfig(aggregation=how)
    result = accumulate(
        mixed(config),
        Loss(function=ppo_clip, config=config),
        forward=forward,
        backward=lambda loss, last: None,
        max_tokens=max_tokens,
    )
    policy = {"token_mean": -2 / 3, "seq_mean_token_mean": 0.0, "seq_mean_token_sum": -1.0}[how]
    assert result.loss == pytest.approx(policy + 0.5 * 1.0)
    assert result.metrics["ptx_loss"].value == pytest.approx(1.0)
    assert result.metrics["ratio"].value == pytest.approx(1.0)
    assert result.metrics["ratio"].weight == 3


def test_widths_names_and_columns():
    batch = mixed(PPOClipConfig())
    assert batch.token_ids.shape == (4, 4)
    assert set(batch.columns) == {"advantages", "old_log_probs", "importance_weights", "ptx_coef"}
    assert batch["ptx_coef"].tolist() == pytest.approx([0, 0, 0.5 * 3 / 4, 0.5 * 3 / 4])


def test_pairs_are_refused():
    mask = torch.ones(2, 2, dtype=torch.bool)
    pairs = Batch(
        token_ids=torch.ones(2, 2, dtype=torch.long), attention_mask=mask, response_mask=mask, rows_per_unit=2
    )
    with pytest.raises(ConfigError, match="single rows"):
        mix_pretraining(pairs, pairs, 0.1, PPOClipConfig())


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize("max_tokens", [4, 100])
def test_policy_mean_plus_coef_times_the_likelihood_of_right_answers(how, max_tokens):
    """Three tokens of right answers at log-prob -1: their mean negative log-likelihood is 1, whatever the mean."""
    config = PPOClipConfig(aggregation=how)
    batch = rows(
        [[0, 1, 1], [0, 1, 0], [0, 0, 1]],
        advantages=torch.zeros(3),
        old_log_probs=torch.full((3, 3), -1.0),
    )
    right = torch.tensor([True, False, True])
    result = accumulate(
        with_likelihood(batch, right, 0.1, config),
        Loss(function=ppo_clip, config=config),
        forward=forward,
        backward=lambda loss, last: loss.backward(),
        max_tokens=max_tokens,
    )
    assert result.loss == pytest.approx(0.1)
    assert result.metrics["likelihood_loss"].value == pytest.approx(1.0)
    assert result.metrics["likelihood_loss"].weight == 3


def test_no_right_answer_adds_nothing():
    batch = rows([[0, 1, 1]], advantages=torch.ones(1), old_log_probs=torch.full((1, 3), -1.0))
    weight = with_likelihood(batch, torch.tensor([False]), 0.1, PPOClipConfig())["likelihood_weight"]
    assert weight.tolist() == [0.0]


def test_rows_without_padding_are_mixed_likewise():
    config = PPOClipConfig(aggregation="seq_mean_token_mean")
    policy = rows([[0, 1, 1], [0, 1, 0]], advantages=torch.tensor([1.0, -1.0]), old_log_probs=torch.ones(2, 3))
    text = rows([[0, 1, 1, 1]])
    whole = mix_pretraining(policy, text, 0.5, config)
    ragged = mix_pretraining(RaggedBatch.of(policy), RaggedBatch.of(text), 0.5, config).padded()
    for name in ("token_ids", "attention_mask", "response_mask"):
        assert torch.equal(getattr(whole, name), getattr(ragged, name)), name
    assert all(torch.equal(whole[name], ragged[name]) for name in whole.columns)


def test_samples_of_another_temperature_are_refused():
    warm = replace(rows([[0, 1]]), temperature=0.7)
    with pytest.raises(ConfigError, match=r"temperature 0\.7"):
        mix_pretraining(warm, rows([[0, 1]]), 0.1, PPOClipConfig())


def own_loss(outputs, batch, config):
    """A loss of a user's own, whose config is a dict."""


def test_a_weight_needs_one_of_our_losses_and_is_no_negative_number():
    with pytest.raises(ConfigError, match="ptx_coef is a term of our own policy losses"):
        make_recipe("ppo", {"loss": f"{__name__}:own_loss", "ptx_coef": 0.1})
    with pytest.raises(ConfigError, match="ptx_coef must be a finite number and not negative, got -1"):
        make_recipe("grpo", {"ptx_coef": -1})
