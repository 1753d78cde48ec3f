"""Preference losses that need no reference model: SimPO, CPO, TPO and ORPO. Rows alternate chosen, rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from rlhf_core import Batch, ConfigError, DataError, LossTerms, ModelOutputs, mean_of
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_algos.choices import check_choices
from rlhf_algos.losses.offline.pairwise import PAIR_LOSSES, PairLossSettings, smoothed_sigmoid
from rlhf_algos.losses.offline.preference import SFTMean, chosen_nll, pair_metrics
from rlhf_algos.losses.offline.responses import response_lengths, response_log_probs, split_pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class SimPOConfig:
    """Configuration of `simpo`."""

    beta: float = 2.0
    """Scale of the mean log-probs."""
    gamma: float = 1.0
    """Target margin between beta times the mean log-probs (TRL's `simpo_gamma`; the paper's gamma)."""
    alpha: float = 0.0
    """Shape of the reward (AlphaPO, Gupta et al. 2025, 2501.03884): (1 - exp(-alpha m)) / alpha in place of
    the mean log-prob m; 0 is m itself. See `alpha_reward`."""
    label_smoothing: float = 0.0
    """Probability that a label is flipped."""
    sft_coef: float = 0.0
    """Weight of the negative log-likelihood of the chosen response (CPO-SimPO; TRL's `cpo_alpha`)."""
    sft_mean: SFTMean = "sequence"
    """Mean over each response, or over all chosen tokens (TRL), which needs `with_sft_divisor`."""

    def __post_init__(self) -> None:
        _check(self.beta, self.label_smoothing)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("log_probs",)

    @property
    def needs_sft_divisor(self) -> bool:
        """True if the batch must have the column of `with_sft_divisor`."""
        return bool(self.sft_coef) and self.sft_mean == "token"


def simpo(outputs: ModelOutputs, batch: Batch, config: SimPOConfig) -> LossTerms:
    """SimPO (Meng et al. 2024, eq. 6): -log sigmoid(beta (m_chosen - m_rejected) - gamma), a mean over pairs.

    m is the mean log-prob per token of a response, or its `alpha_reward`. Metrics as for `dpo`, rewards being
    beta m."""
    rewards = alpha_reward(response_log_probs(outputs, batch, mean=True), config.alpha)
    chosen, rejected = split_pairs(rewards, batch)
    losses = smoothed_sigmoid(config.beta * (chosen - rejected) - config.gamma, config.label_smoothing)
    return _terms(losses, config.beta * rewards, outputs, batch, (config.sft_coef, config.sft_mean))


def alpha_reward(log_p: Float[Tensor, " rows"], alpha: float) -> Float[Tensor, " rows"]:
    """(1 - p^-alpha) / alpha; log p for alpha 0. Above 0 improbable responses count for more, below 0 for less."""
    if not alpha:
        return log_p
    return -(-alpha * log_p).clamp(max=_MAX_EXPONENT).expm1() / alpha


_MAX_EXPONENT = 80.0  # exp of it still fits float32

CPOLoss = Literal["sigmoid", "hinge", "ipo"]
"""See `PairLoss`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CPOConfig:
    """Configuration of `cpo`."""

    loss: CPOLoss = "sigmoid"
    """See `CPOLoss`; `ipo` takes mean log-probs (as TRL), the others sums."""
    beta: float = 0.1
    """Scale of the log-probs."""
    alpha: float = 0.0
    """See `SimPOConfig.alpha`."""
    label_smoothing: float = 0.0
    """Probability that a label is flipped; `sigmoid` only."""
    sft_coef: float = 1.0
    """Weight of the behaviour-cloning term on the chosen response (TRL's `cpo_alpha`)."""
    sft_mean: SFTMean = "sequence"
    """Mean over each response, or over all chosen tokens (TRL), which needs `with_sft_divisor`."""

    def __post_init__(self) -> None:
        _check(self.beta, self.label_smoothing)
        check_choices("cpo", self, loss=CPOLoss, sft_mean=SFTMean)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("log_probs",)

    @property
    def needs_sft_divisor(self) -> bool:
        """True if the batch must have the column of `with_sft_divisor`."""
        return bool(self.sft_coef) and self.sft_mean == "token"


def cpo(outputs: ModelOutputs, batch: Batch, config: CPOConfig) -> LossTerms:
    """CPO (Xu et al. 2024, eq. 3): DPO with a uniform reference plus behaviour cloning, a mean over pairs."""
    values = alpha_reward(response_log_probs(outputs, batch, mean=config.loss == "ipo"), config.alpha)
    chosen, rejected = split_pairs(values, batch)
    settings = PairLossSettings(beta=config.beta, label_smoothing=config.label_smoothing)
    losses = PAIR_LOSSES[config.loss](chosen, rejected, settings)
    return _terms(losses, config.beta * values, outputs, batch, (config.sft_coef, config.sft_mean))


@dataclass(frozen=True, kw_only=True, slots=True)
class TPOConfig:
    """Configuration of `tpo`."""

    loss: CPOLoss = "sigmoid"
    """See `CPOConfig.loss`."""
    beta: float = 0.01
    """Scale of the log-probs."""
    length_normalized: bool = False
    """Mean log-probs per token in place of sums (TPO-L); `ipo` always takes means."""
    gamma: float = 0.0
    """Target margin between beta times the log-probs (TPO-L; TRL's `tpo_l_gamma`); `sigmoid` only."""
    label_smoothing: float = 0.0
    """Probability that a label is flipped; `sigmoid` only."""
    sft_coef: float = 1.0
    """Weight of the negative log-likelihood of the gold response (TRL's `tpo_alpha`)."""
    sft_mean: SFTMean = "token"
    """Mean over all gold tokens of the batch (TRL), which needs the column of `with_sft_divisor`, or over each
    response."""

    def __post_init__(self) -> None:
        _check(self.beta, self.label_smoothing)
        check_choices("tpo", self, loss=CPOLoss, sft_mean=SFTMean)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("log_probs",)

    @property
    def needs_sft_divisor(self) -> bool:
        """True if the batch must have the column of `with_sft_divisor`."""
        return bool(self.sft_coef) and self.sft_mean == "token"


def tpo(outputs: ModelOutputs, batch: Batch, config: TPOConfig) -> LossTerms:
    """Triple preference optimisation (Saeidi et al. 2024, 2405.16681), a mean over triples.

    CPO between a chosen and a rejected response, plus the likelihood of a third one, the gold response. Rows
    alternate chosen, rejected, gold (`rows_per_unit=3`). Metrics: preference_loss, accuracy, margin, sft_loss.
    """
    if batch.rows_per_unit != 3:
        raise DataError(
            f"tpo needs rows in triples (chosen, rejected, gold) and rows_per_unit=3, got {batch.rows_per_unit}"
        )
    values = response_log_probs(outputs, batch, mean=config.length_normalized or config.loss == "ipo")
    chosen, rejected = config.beta * values[0::3], config.beta * values[1::3]
    if config.loss == "sigmoid":
        losses = smoothed_sigmoid(chosen - rejected - config.gamma, config.label_smoothing)
    else:
        losses = PAIR_LOSSES[config.loss](values[0::3], values[1::3], PairLossSettings(beta=config.beta))
    divisor = (
        response_lengths(batch) if config.sft_mean == "sequence" or not config.sft_coef else batch["sft_divisor"]
    )
    nll = -response_log_probs(outputs, batch)[2::3] / divisor[2::3]
    metrics = {
        "preference_loss": mean_of(losses),
        "accuracy": mean_of((chosen > rejected).float()),
        "margin": mean_of(chosen - rejected),
        "sft_loss": mean_of(nll),
    }
    total = losses.sum() + config.sft_coef * nll.sum()
    return LossTerms(total=total, weight=torch.tensor(float(batch.units)), metrics=metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class ORPOConfig:
    """Configuration of `orpo`."""

    beta: float = 0.1
    """Weight of the odds-ratio term (lambda in the paper)."""
    sft_mean: SFTMean = "token"
    """Mean of the likelihood term over all chosen tokens (needs `with_sft_divisor`) or over each response. TRL
    takes the tokens of prompts into that mean, too; here the response mask decides."""

    def __post_init__(self) -> None:
        _check(self.beta, 0.0)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("log_probs",)

    @property
    def needs_sft_divisor(self) -> bool:
        """True if the batch must have the column of `with_sft_divisor`."""
        return self.sft_mean == "token"


def orpo(outputs: ModelOutputs, batch: Batch, config: ORPOConfig) -> LossTerms:
    """ORPO (Hong et al. 2024, eq. 6): likelihood of the chosen response plus beta times the odds-ratio loss.

    -log sigmoid(log odds_chosen - log odds_rejected), odds = p / (1 - p), log p the mean log-prob per token. A mean
    over pairs. Metrics as for `dpo`, rewards being beta log p, and log_odds_ratio.
    """
    means = response_log_probs(outputs, batch, mean=True)
    chosen, rejected = split_pairs(log_odds(means), batch)
    losses = -config.beta * logsigmoid(chosen - rejected)
    terms = _terms(losses, config.beta * means, outputs, batch, (1.0, config.sft_mean))
    metrics = {**terms.metrics, "log_odds_ratio": mean_of(chosen - rejected)}
    return LossTerms(total=terms.total, weight=terms.weight, metrics=metrics)


def log_odds(log_p: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log(p / (1 - p)) from log p, finite for p = 1 (and so for an empty response)."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    near_one = log_p > -0.6931
    # Each branch gets an argument at which its derivative exists, or `where` would pass on NaN gradients.
    small = torch.where(near_one, log_p, -1e-3).expm1().neg().log()
    large = torch.log1p(-torch.where(near_one, -1.0, log_p).exp())
    return log_p - torch.where(near_one, small, large)


def _terms(
    losses: Tensor, rewards: Tensor, outputs: ModelOutputs, batch: Batch, sft: tuple[float, SFTMean]
) -> LossTerms:
    metrics = pair_metrics(outputs, batch, rewards) | {"preference_loss": mean_of(losses)}
    total = losses.sum()
    if sft[0]:
        nll = chosen_nll(outputs, batch, sft[1])
        total = total + sft[0] * nll.sum()
        metrics["sft_loss"] = mean_of(nll)
    return LossTerms(total=total, weight=torch.tensor(float(batch.units)), metrics=metrics)


def _check(beta: float, label_smoothing: float) -> None:
    if beta <= 0:
        raise ConfigError(f"preference loss: beta must be positive, got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"preference loss: label_smoothing must be in [0, 0.5), got {label_smoothing}")
