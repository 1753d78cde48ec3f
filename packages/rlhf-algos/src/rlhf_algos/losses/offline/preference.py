"""Direct preference optimisation against a reference, in its published forms.

Rows alternate chosen, rejected (`rows_per_unit=2`). Column `ref_log_probs_sum` [rows]: the reference's log-prob
of the response, summed over its tokens. The loss is a mean over pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from rlhf_core import Batch, ConfigError, LossTerms, Mean, ModelOutputs, masked_mean, mean_of
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_algos.choices import check_choices
from rlhf_algos.losses.aggregation import add_aux_loss
from rlhf_algos.losses.offline.pairwise import PAIR_LOSSES, PairLoss, PairLossSettings, aot_losses
from rlhf_algos.losses.offline.responses import (
    reference_log_probs,
    response_lengths,
    response_log_probs,
    shared_log_probs,
    split_pairs,
)

SFTMean = Literal["sequence", "token"]
"""Mean of a likelihood term beside a preference loss: over the tokens of each response, then over pairs (OpenRLHF's
`nll_loss_coef`); or over all chosen tokens of the batch (TRL's loss type `sft`), which needs the column of
`with_sft_divisor`."""

FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
"""Divergence that keeps the policy near the reference (f-DPO, Wang et al. 2023); DPO's own is the reverse KL."""

DIFFERENCE_LOSSES = ("sigmoid", "hinge", "ipo", "robust", "exo", "discopop")
"""Losses of the difference of the two scores alone; the others take each log-ratio for itself."""

_MAX_EXPONENT = 80.0  # exp of it still fits float32


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOConfig:
    """Configuration of `dpo`."""

    loss: PairLoss = "sigmoid"
    """See `PairLoss`."""
    beta: float = 0.1
    """Strength of the pull towards the reference; the tau of IPO."""
    label_smoothing: float = 0.0
    """Probability that a label is flipped: cDPO (`sigmoid`), `robust`, `exo`, `aot`."""
    length_normalized: bool = False
    """Divide each response's score by its tokens. For `ipo`: True in TRL, False in OpenRLHF and in the paper's
    formula. For `sigmoid`: LN-DPO, TRL's `sigmoid_norm`."""
    reference_free: bool = False
    """A uniform reference: `ref_log_probs_sum` is not read."""
    f_divergence: FDivergence = "reverse_kl"
    """See `FDivergence`; for the losses that take the difference of the two scores (`DIFFERENCE_LOSSES`)."""
    alpha: float = 0.5
    """Order of the alpha divergence."""
    ld_alpha: float = 1.0
    """Weight of the log-probs past as many tokens as the shorter response of the pair has (LD-DPO, Liu et al. 2024,
    2409.06411): below 1 the longer one gains less by being longer. Needs the column `ref_log_probs_shared`."""
    weighted: bool = False
    """Weigh each pair by how likely both responses are under the policy (WPO, Zhou et al. 2024, 2406.11827): the
    product of exp(mean log(p_t / sum_v p_t(v)^2)) over both, without a gradient (TRL's `use_weighting`)."""
    exploration_coef: float = 0.0
    """Weight of the log-prob of the reference's own response, which is made less likely (XPO, Xie et al. 2024,
    2405.21046): one response of each pair is the policy's sample, the other, marked in the column `from_reference`
    [rows] bool, the reference's."""
    discopop_tau: float = 0.05
    """Temperature of DiscoPOP's blend."""
    sft_coef: float = 0.0
    """Weight of the negative log-likelihood of the chosen response (RPO)."""
    sft_mean: SFTMean = "sequence"
    """See `SFTMean`."""
    aux_loss_coef: float = 0.0
    """See `PolicyTermsConfig.aux_loss_coef`."""

    def __post_init__(self) -> None:
        check_choices("dpo", self, loss=PairLoss, f_divergence=FDivergence, sft_mean=SFTMean)
        if self.beta <= 0:
            raise ConfigError(f"dpo: beta must be positive, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"dpo: label_smoothing must be in [0, 0.5), got {self.label_smoothing}")
        if self.f_divergence != "reverse_kl" and self.loss not in DIFFERENCE_LOSSES:
            raise ConfigError(
                f"dpo: the loss {self.loss!r} is defined for f_divergence 'reverse_kl' alone, got "
                f"{self.f_divergence!r}; write one of {', '.join(DIFFERENCE_LOSSES)} to use it"
            )
        if self.ld_alpha != 1 and (self.loss in ("aot", "aot_unpaired") or not 0 <= self.ld_alpha <= 1):
            raise ConfigError(
                f"dpo: ld_alpha must be in [0, 1], and 1 with the AOT losses, got {self.ld_alpha} with "
                f"{self.loss!r}"
            )
        if self.loss == "exo" and self.label_smoothing == 0:
            raise ConfigError("dpo: the loss 'exo' takes the log of label_smoothing; write for instance 0.001")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        extra = (("log_collision",) if self.weighted else ()) + (("aux_loss",) if self.aux_loss_coef else ())
        return ("log_probs", *extra)

    @property
    def needs_sft_divisor(self) -> bool:
        """True if the batch must have the column of `with_sft_divisor`."""
        return bool(self.sft_coef) and self.sft_mean == "token"

    @property
    def needs_reference(self) -> bool:
        """True if the batch must have the column `ref_log_probs_sum`."""
        return not self.reference_free


def dpo(outputs: ModelOutputs, batch: Batch, config: DPOConfig) -> LossTerms:
    """DPO (Rafailov et al. 2023, eq. 7) and its relatives, a mean over pairs.

    With h = log_probs_sum - ref_log_probs_sum of a response, `sigmoid` is
    -(1 - eps) log sigmoid(beta (s_chosen - s_rejected)) - eps log sigmoid(-beta (s_chosen - s_rejected)), where the
    score s is h, or f'(exp(h)) with an f-divergence, divided by the response's tokens if `length_normalized`.

    Metrics: preference_loss, accuracy, margin, rewards_chosen, rewards_rejected (beta h), log_probs_chosen,
    log_probs_rejected, sft_loss.
    """
    log_ratio = reference_log_ratios(outputs, batch, config)
    scores = f_score(log_ratio, config.f_divergence, config.alpha)
    if config.length_normalized:
        log_ratio, scores = (x / response_lengths(batch) for x in (log_ratio, scores))
    chosen, rejected = split_pairs(scores, batch)
    settings = PairLossSettings(
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        tau=config.discopop_tau,
        shift=split_pairs(batch["reward_shift"], batch)[0] if "reward_shift" in batch else None,
    )
    if config.loss in ("aot", "aot_unpaired"):
        losses = aot_losses(chosen, rejected, batch, settings, paired=config.loss == "aot")
    else:
        losses = PAIR_LOSSES[config.loss](chosen, rejected, settings)
    if config.weighted:
        losses = losses * pair_weights(outputs, batch)
    metrics = pair_metrics(outputs, batch, config.beta * log_ratio) | {"preference_loss": mean_of(losses)}
    total = losses.sum()
    if config.sft_coef:
        nll = chosen_nll(outputs, batch, config.sft_mean)
        total = total + config.sft_coef * nll.sum()
        metrics["sft_loss"] = mean_of(nll)
    if config.exploration_coef:
        explored = response_log_probs(outputs, batch) * batch["from_reference"].bool()
        total = total + config.exploration_coef * explored.sum()
    weight = torch.tensor(float(batch.units), device=total.device)
    return add_aux_loss(LossTerms(total=total, weight=weight, metrics=metrics), outputs, config.aux_loss_coef)


def reference_log_ratios(outputs: ModelOutputs, batch: Batch, config: DPOConfig) -> Float[Tensor, " rows"]:
    """log(policy / reference) of each response, its tail weighted by `ld_alpha`; log(policy) if
    `reference_free`."""
    log_ratio = response_log_probs(outputs, batch)
    if not config.reference_free:
        log_ratio = log_ratio - reference_log_probs(batch)
    if config.ld_alpha == 1:
        return log_ratio
    shared = shared_log_probs(outputs, batch)
    if not config.reference_free:
        shared = shared - batch["ref_log_probs_shared"]
    return shared + config.ld_alpha * (log_ratio - shared)


def pair_weights(outputs: ModelOutputs, batch: Batch) -> Float[Tensor, " pairs"]:
    """How likely both responses of each pair are under the policy, per token and against a token drawn from it."""
    log_probs, collision = outputs.log_probs, outputs.log_collision
    if log_probs is None or collision is None:
        raise ConfigError("weighted needs log_collision among the engine's outputs")
    per_token = (log_probs - collision).detach()
    weights = masked_mean(per_token, batch.response_mask, dim=1).clamp(max=_MAX_EXPONENT / 2).exp()
    chosen, rejected = split_pairs(weights, batch)
    return chosen * rejected


def f_score(log_ratio: Float[Tensor, " rows"], kind: FDivergence, alpha: float) -> Float[Tensor, " rows"]:
    """f'(exp(log_ratio)) of the divergence, the score that replaces the log-ratio (Wang et al. 2023, table 1).

    forward_kl: 1 - 1/u; js_divergence: log(2u / (1 + u)); alpha_divergence: (u^(alpha - 1) - 1) / (alpha - 1).
    """
    if kind == "forward_kl":
        return 1 - (-log_ratio).clamp(max=_MAX_EXPONENT).exp()
    if kind == "js_divergence":
        return math.log(2) + logsigmoid(log_ratio)
    if kind == "alpha_divergence" and abs(alpha - 1) >= 1e-6:
        return ((alpha - 1) * log_ratio).clamp(max=_MAX_EXPONENT).expm1() / (alpha - 1)
    return log_ratio


def chosen_nll(outputs: ModelOutputs, batch: Batch, mean: SFTMean) -> Float[Tensor, " pairs"]:
    """Negative log-likelihood of each chosen response, such that its mean over pairs is the mean asked for.

    `token` reads the column `sft_divisor` [rows].
    """
    total = -split_pairs(response_log_probs(outputs, batch), batch)[0]
    divisor = response_lengths(batch) if mean == "sequence" else batch["sft_divisor"]
    return total / split_pairs(divisor, batch)[0]


def with_sft_divisor(batch: Batch, *, place: int = 0) -> Batch:
    """Add the column `sft_divisor` [rows]: chosen tokens per pair of the *global* batch, which `batch` must be.

    `place` says which row of a unit the likelihood is of: 0, the chosen one, or 2, the gold one of a triple.

    A mean over tokens and a mean over pairs have different denominators; this constant makes one sum of both,
    whatever the micro-batches.
    """
    tokens = batch.response_mask[place :: batch.rows_per_unit].sum().clamp(min=1)
    return batch.with_columns(sft_divisor=(tokens / max(batch.units, 1)).expand(batch.rows).clone())


def pair_metrics(outputs: ModelOutputs, batch: Batch, rewards: Float[Tensor, " rows"]) -> dict[str, Mean]:
    """Rewards, their margin and accuracy, and log-probs of both sides; means over pairs."""
    chosen, rejected = split_pairs(rewards, batch)
    log_probs_chosen, log_probs_rejected = split_pairs(response_log_probs(outputs, batch), batch)
    return {
        "rewards_chosen": mean_of(chosen),
        "rewards_rejected": mean_of(rejected),
        "margin": mean_of(chosen - rejected),
        "accuracy": mean_of((chosen > rejected).float()),
        "log_probs_chosen": mean_of(log_probs_chosen),
        "log_probs_rejected": mean_of(log_probs_rejected),
    }
