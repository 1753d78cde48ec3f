"""Losses of reward models: pairwise for whole responses, stepwise for process reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from rlhf_core import Batch, ConfigError, LossTerms, ModelOutputs, Role, masked_sum, mean_of
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from rlhf_algos.choices import check_choices
from rlhf_algos.losses.offline.responses import split_pairs

RewardLoss = Literal["sigmoid", "log_exp"]
"""With g = score_chosen - score_rejected - margin: `sigmoid` is -log sigmoid(g), `log_exp` log(1 + exp(-g)). They
are the same function; both names are known from other projects. (OpenRLHF's `log_exp` overflows from a gap of -89
on and ignores the margin; this one does neither.)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BradleyTerryConfig:
    """Configuration of `bradley_terry`."""

    loss: RewardLoss = "sigmoid"
    """See `RewardLoss`."""
    center_coef: float = 0.0
    """Weight of (score_chosen + score_rejected)^2, which keeps scores around zero (Eisenstein et al. 2023; TRL's
    `center_rewards_coefficient`)."""
    keep_scale: bool = False
    """Write mean and deviation of the scores of all held-out answers (without any: of those trained on) into the
    exported model's config, by which engines then normalise its scores (OpenRLHF's `normalize_reward`)."""

    def __post_init__(self) -> None:
        check_choices("bradley_terry", self, loss=RewardLoss)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("scores",)


def bradley_terry(outputs: ModelOutputs, batch: Batch, config: BradleyTerryConfig) -> LossTerms:
    """Bradley-Terry with margin (Touvron et al. 2023, eq. 2), a mean over pairs.

    Needs `scores`. Rows alternate chosen, rejected. Optional column `margin` [rows], read from the chosen rows.
    Metrics: reward_loss, accuracy, margin, score_chosen, score_rejected.
    """
    if outputs.scores is None:
        raise ConfigError("bradley_terry needs scores; use Loss(..., outputs=('scores',))")
    chosen, rejected = split_pairs(outputs.scores, batch)
    gap = chosen - rejected
    if "margin" in batch:
        gap = gap - split_pairs(batch["margin"], batch)[0]
    losses = -logsigmoid(gap) if config.loss == "sigmoid" else softplus(-gap)
    if config.center_coef:
        losses = losses + config.center_coef * (chosen + rejected).square()
    metrics = {
        "reward_loss": mean_of(losses),
        "accuracy": mean_of((chosen > rejected).float()),
        "margin": mean_of(chosen - rejected),
        "score_chosen": mean_of(chosen),
        "score_rejected": mean_of(rejected),
    }
    return LossTerms(total=losses.sum(), weight=torch.tensor(float(batch.units)), metrics=metrics)


Supervision = Literal["process", "outcome"]
"""`process`: every labelled step counts; `outcome`: the last one of each row, which judges the answer."""

LabelSoftmax = Literal["labels", "vocabulary"]
"""Probabilities among the two label tokens (OpenRLHF with `reward_tokens`), or in the whole vocabulary (OpenRLHF
without)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRewardLossConfig:
    """Configuration of `process_reward_loss`."""

    supervision: Supervision = "process"
    """See `Supervision`."""
    label_tokens: tuple[str, ...] = ()
    """Empty: a scalar head. Two texts of one token each, for a right and a wrong step (OpenRLHF's `reward_tokens`):
    the language-model head's probabilities of these tokens at the placeholder."""
    label_softmax: LabelSoftmax = "labels"
    """See `LabelSoftmax`."""

    def __post_init__(self) -> None:
        check_choices("process_reward_loss", self, supervision=Supervision, label_softmax=LabelSoftmax)
        if len(self.label_tokens) not in (0, 2) or len(set(self.label_tokens)) != len(self.label_tokens):
            raise ConfigError(
                f"process_reward_loss: label_tokens {list(self.label_tokens)}; write two different ones, for right "
                "and wrong steps, or none for a scalar head"
            )
        if self.label_softmax == "vocabulary" and not self.label_tokens:
            raise ConfigError("process_reward_loss: label_softmax: vocabulary needs label_tokens: [right, wrong]")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("candidate_log_probs",) if self.label_tokens else ("values",)

    @property
    def role(self) -> Role:
        """The kind of model that has the head."""
        return "policy" if self.label_tokens else "reward"


def process_reward_loss(outputs: ModelOutputs, batch: Batch, config: ProcessRewardLossConfig) -> LossTerms:
    """Binary cross-entropy of each step's value against its label (Lightman et al. 2023; Wang et al. 2024).

    Needs `values` (a scalar head), or with `config.label_tokens` `candidate_log_probs` of the two label tokens,
    right before wrong (column `candidate_ids`): their difference is the same logit as a scalar head's.
    `response_mask` is True on the token *after* a step's placeholder, where the head's output is that at the
    placeholder itself; `step_positions` makes that mask. Column `step_labels` [rows, length]: probability that the
    step is right, 0 or 1 for hard labels. A mean over steps.

    Metrics: process_loss, step_accuracy.
    """
    _check_outputs(outputs, config)
    mask = batch.response_mask
    if config.supervision == "outcome":
        mask = last_true(mask)
    right, wrong = _step_log_probs(outputs, mask, config)
    labels = batch["step_labels"].masked_fill(~mask, 0).to(right.dtype)
    losses = (-labels * right - (1 - labels) * wrong).masked_fill(~mask, 0)
    metrics = {
        "process_loss": mean_of(losses, mask),
        "step_accuracy": mean_of(((right > wrong) == (labels > 0.5)).float(), mask),
    }
    return LossTerms(total=masked_sum(losses, mask), weight=mask.sum().float(), metrics=metrics)


def _check_outputs(outputs: ModelOutputs, config: ProcessRewardLossConfig) -> None:
    (name,) = config.outputs
    if getattr(outputs, name) is None:
        raise ConfigError(f"process_reward_loss needs {name}; use Loss(..., outputs=({name!r},))")


def _step_log_probs(
    outputs: ModelOutputs, mask: Bool[Tensor, "rows length"], config: ProcessRewardLossConfig
) -> tuple[Float[Tensor, "rows length"], Float[Tensor, "rows length"]]:
    """Log-probs that each step is right and wrong."""
    if not config.label_tokens:
        values: Any = outputs.values
        logits = values.masked_fill(~mask, 0)
        return logsigmoid(logits), logsigmoid(-logits)
    candidates: Any = outputs.candidate_log_probs
    right, wrong = candidates.masked_fill(~mask[..., None], 0).unbind(dim=-1)
    if config.label_softmax == "vocabulary":
        return right, wrong
    return logsigmoid(right - wrong), logsigmoid(wrong - right)


def step_positions(
    token_ids: Int[Tensor, "rows length"], attention_mask: Bool[Tensor, "rows length"], placeholder_id: int
) -> Bool[Tensor, "rows length"]:
    """True on the token after each placeholder: the response mask of `process_reward_loss`.

    A placeholder must be followed by a token; end the row with end-of-text.

    Raises:
        ConfigError: a row ends with a placeholder.
    """
    marks = (token_ids == placeholder_id) & attention_mask
    mask = torch.zeros_like(marks)
    mask[:, 1:] = marks[:, :-1] & attention_mask[:, 1:]
    if int(mask.sum()) != int(marks.sum()):
        rows = (marks.sum(dim=1) != mask.sum(dim=1)).nonzero().flatten().tolist()
        raise ConfigError(f"rows {rows[:5]} end with the step placeholder; append the end-of-text token")
    return mask


def step_label_losses(
    logits: Float[Tensor, "steps vocab"],
    labels: Float[Tensor, "steps labels"],
    label_token_ids: Int[Tensor, " labels"],
) -> Float[Tensor, " steps"]:
    """Cross-entropy over the label tokens at each placeholder, for a process reward model with a causal head.

    Args:
        logits: at the placeholders.
        labels: probability of each label token, one-hot for hard labels (OpenRLHF's soft and hard labels).
        label_token_ids: the label tokens; the softmax is over these alone.
    """
    return -(labels * logits[:, label_token_ids].log_softmax(dim=-1)).sum(dim=-1)


def last_true(mask: Bool[Tensor, "rows length"]) -> Bool[Tensor, "rows length"]:
    """Only the last True of each row."""
    remaining = mask.long().flip(1).cumsum(1).flip(1)
    return mask & (remaining == 1)
