import math

import pytest
import torch
from rlhf_algos.losses.offline.reward_model import (
    BradleyTerryConfig,
    ProcessRewardLossConfig,
    bradley_terry,
    last_true,
    process_reward_loss,
    step_label_losses,
    step_positions,
)
from rlhf_core import Batch, ConfigError, ModelOutputs


def softplus(x):
    return math.log1p(math.exp(x))


def pairs(scores, config, **columns):
    scores = torch.tensor(scores, requires_grad=True)
    ones = torch.ones(len(scores), 2, dtype=torch.bool)
    batch = Batch(
        token_ids=torch.zeros(len(scores), 2, dtype=torch.long),
        attention_mask=ones,
        response_mask=ones,
        columns=columns,
        rows_per_unit=2,
    )
    terms = bradley_terry(ModelOutputs(scores=scores), batch, config)
    terms.total.backward()
    return scores, terms


@pytest.mark.parametrize("loss", ["sigmoid", "log_exp"])
def test_bradley_terry_with_margin(loss):
    scores, terms = pairs(
        [1.0, 0.0, -1.0, 0.5], BradleyTerryConfig(loss=loss), margin=torch.tensor([0.5, 9, 0.0, 9])
    )
    assert float(terms.total.detach()) == pytest.approx(softplus(-0.5) + softplus(1.5))
    assert float(terms.weight) == 2
    assert terms.metrics["accuracy"].value == 0.5
    assert terms.metrics["margin"].value == pytest.approx((1 - 1.5) / 2)
    assert (scores.grad[0::2] < 0).all()
    assert (scores.grad[1::2] > 0).all()


@pytest.mark.parametrize("loss", ["sigmoid", "log_exp"])
def test_a_gap_of_100_is_100_not_infinity(loss):
    scores, terms = pairs([0.0, 100.0], BradleyTerryConfig(loss=loss))
    assert float(terms.total.detach()) == pytest.approx(100.0)
    assert scores.grad.tolist() == pytest.approx([-1, 1])


def test_centering():
    _, plain = pairs([1.0, 2.0], BradleyTerryConfig())
    _, centred = pairs([1.0, 2.0], BradleyTerryConfig(center_coef=0.1))
    assert float((centred.total - plain.total).detach()) == pytest.approx(0.9)


IDS = torch.tensor([[5, 9, 6, 9, 1], [5, 9, 1, 0, 0]])
ATTENTION = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()


def test_step_positions_follow_the_placeholders():
    assert step_positions(IDS, ATTENTION, 9).tolist() == [
        [False, False, True, False, True],
        [False, False, True, False, False],
    ]
    with pytest.raises(ConfigError, match="rows \\[1\\]"):
        step_positions(IDS[:, :3], torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(), 9)


def steps(config, labels):
    mask = step_positions(IDS, ATTENTION, 9)
    batch = Batch(
        token_ids=IDS, attention_mask=ATTENTION, response_mask=mask, columns={"step_labels": torch.tensor(labels)}
    )
    values = torch.tensor([[7, 7, 1.0, 7, -2.0], [7, 7, 0.5, 7, 7]])
    return process_reward_loss(ModelOutputs(values=values), batch, config)


def test_process_supervision_with_hard_and_soft_labels():
    terms = steps(ProcessRewardLossConfig(), [[9, 9, 1.0, 9, 0.0], [9, 9, 0.25, 9, 9]])
    expected = softplus(-1.0) + softplus(-2.0) + 0.25 * softplus(-0.5) + 0.75 * softplus(0.5)
    assert float(terms.total) == pytest.approx(expected)
    assert float(terms.weight) == 3
    assert terms.metrics["step_accuracy"].value == pytest.approx(2 / 3)


def test_outcome_supervision_takes_the_last_step():
    terms = steps(ProcessRewardLossConfig(supervision="outcome"), [[9, 9, 1.0, 9, 0.0], [9, 9, 1.0, 9, 9]])
    assert float(terms.total) == pytest.approx(softplus(-2.0) + softplus(-0.5))
    assert float(terms.weight) == 2


def test_label_tokens_equal_a_scalar_head_on_their_difference():
    torch.manual_seed(0)
    logits = torch.randn(3, 7)
    labels = torch.tensor([1.0, 0.0, 0.3])
    got = step_label_losses(logits, torch.stack([labels, 1 - labels], dim=1), torch.tensor([4, 2]))
    scalar = logits[:, 4] - logits[:, 2]
    torch.testing.assert_close(
        got, torch.nn.functional.binary_cross_entropy_with_logits(scalar, labels, reduction="none")
    )


def label_steps(config, labels):
    """The steps of `steps`, with logits of a vocabulary of 7 in place of values."""
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7)
    ids = torch.tensor([4, 2]).expand(2, 5, 2)
    batch = Batch(
        token_ids=IDS,
        attention_mask=ATTENTION,
        response_mask=step_positions(IDS, ATTENTION, 9),
        columns={"step_labels": torch.tensor(labels), "candidate_ids": ids},
    )
    outputs = ModelOutputs(candidate_log_probs=logits.log_softmax(-1).gather(-1, ids))
    return logits[batch.response_mask], process_reward_loss(outputs, batch, config)


@pytest.mark.parametrize("labels", [(1.0, 0.0, 1.0), (0.8, 0.3, 0.5)])
def test_label_tokens_of_a_language_model_head(labels):
    columns = [[9, 9, labels[0], 9, labels[1]], [9, 9, labels[2], 9, 9]]
    config = ProcessRewardLossConfig(label_tokens=("+", "-"))
    assert (config.role, config.outputs) == ("policy", ("candidate_log_probs",))
    logits, terms = label_steps(config, columns)
    wanted = torch.tensor(labels)
    soft = torch.stack([wanted, 1 - wanted], dim=1)
    expected = step_label_losses(logits, soft, torch.tensor([4, 2])).sum()
    assert float(terms.total) == pytest.approx(float(expected), rel=1e-5)
    assert float(terms.weight) == 3
    logits, terms = label_steps(
        ProcessRewardLossConfig(label_tokens=("+", "-"), label_softmax="vocabulary"), columns
    )
    expected = -(soft * logits.log_softmax(-1)[:, [4, 2]]).sum()
    assert float(terms.total) == pytest.approx(float(expected), rel=1e-5)


def test_last_true():
    mask = torch.tensor([[True, False, True, False], [False, False, False, False]])
    assert last_true(mask).tolist() == [[False, False, True, False], [False] * 4]


def test_refused():
    with pytest.raises(ConfigError, match="sigmoid, log_exp"):
        BradleyTerryConfig(loss="hinge")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="outcome"):
        ProcessRewardLossConfig(supervision="both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two different ones"):
        ProcessRewardLossConfig(label_tokens=("+", "+"))
    with pytest.raises(ConfigError, match="needs label_tokens"):
        ProcessRewardLossConfig(label_softmax="vocabulary")
    with pytest.raises(ConfigError, match="scores"):
        bradley_terry(ModelOutputs(), None, BradleyTerryConfig())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="values"):
        process_reward_loss(ModelOutputs(), None, ProcessRewardLossConfig())  # type: ignore[arg-type]
