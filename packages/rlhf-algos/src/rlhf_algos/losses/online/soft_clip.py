"""Policy losses in which no token loses its whole gradient: CISPO, SAPO and DRO. Columns as for `ppo_clip`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rlhf_core import Batch, ConfigError, LossTerms, ModelOutputs, mean_of

from rlhf_algos.losses.aggregation import Aggregation
from rlhf_algos.losses.online.terms import (
    PolicyTermsConfig,
    finish_policy_loss,
    policy_log_ratios,
    policy_mask,
    token_advantages,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CISPOConfig(PolicyTermsConfig):
    """Configuration of `cispo`."""

    ratio_low: float = 0.0
    """Lower bound of the ratio; 0 (none) in the paper and in TRL, 1 - clip_ratio_low in verl."""
    ratio_high: float = 5.0
    """Upper bound of the ratio itself: TRL's `epsilon_high`, verl's 1 + clip_ratio_high. ScaleRL uses 4 to 8."""

    def __post_init__(self) -> None:
        PolicyTermsConfig.__post_init__(self)
        if not 0 <= self.ratio_low <= self.ratio_high:
            raise ConfigError(
                f"cispo: needs 0 <= ratio_low <= ratio_high, got {self.ratio_low} and {self.ratio_high}"
            )


def cispo(outputs: ModelOutputs, batch: Batch, config: CISPOConfig) -> LossTerms:
    """Clipped importance sampling policy optimization (MiniMax-M1, 2025, eq. 4).

    loss_t = -sg(clip(r_t, ratio_low, ratio_high)) A_t log_probs_t, sg being stop-gradient. Metrics: clip_fraction
    and those of `finish_policy_loss`.
    """
    mask = policy_mask(batch)
    ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit).exp().detach()
    clipped = ratio.clamp(config.ratio_low, config.ratio_high)
    log_probs = outputs.log_probs.masked_fill(~mask, 0)  # type: ignore[union-attr]
    metrics = {"clip_fraction": mean_of((clipped != ratio).float(), mask)}
    return finish_policy_loss(-clipped * token_advantages(batch) * log_probs, outputs, batch, config, metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class SAPOConfig(PolicyTermsConfig):
    """Configuration of `sapo`."""

    aggregation: Aggregation = "seq_mean_token_mean"
    temperature_positive: float = 1.0
    """Steepness of the gate where the advantage is positive."""
    temperature_negative: float = 1.05
    """Steepness where it is not; higher, because those gradients are less stable."""

    def __post_init__(self) -> None:
        PolicyTermsConfig.__post_init__(self)
        if self.temperature_positive <= 0 or self.temperature_negative <= 0:
            raise ConfigError(
                f"sapo: temperatures must be positive, got {self.temperature_positive} and "
                f"{self.temperature_negative}"
            )


def sapo(outputs: ModelOutputs, batch: Batch, config: SAPOConfig) -> LossTerms:
    """Soft adaptive policy optimization (Gao et al. 2025, eq. 5).

    loss_t = -A_t (4 / tau) sigmoid(tau (r_t - 1)): slope 1 at r_t = 1, fading smoothly on both sides. Metrics: gate
    (the slope relative to r_t = 1) and those of `finish_policy_loss`.
    """
    advantages = token_advantages(batch)
    ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit).exp()
    positive, negative = config.temperature_positive, config.temperature_negative
    tau = torch.full_like(ratio, negative).masked_fill(advantages > 0, positive)
    sigmoid = torch.sigmoid(tau * (ratio - 1))
    metrics = {"gate": mean_of(4 * sigmoid * (1 - sigmoid), policy_mask(batch))}
    return finish_policy_loss(-advantages * sigmoid * 4 / tau, outputs, batch, config, metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class DROConfig(PolicyTermsConfig):
    """Configuration of `dro`."""

    beta: float = 0.1
    """Weight of half the squared log-ratio (tau in the papers; verl's `dro_beta`, which has no default)."""

    def __post_init__(self) -> None:
        PolicyTermsConfig.__post_init__(self)
        if self.beta <= 0:
            raise ConfigError(f"dro: beta must be positive, got {self.beta}")


def dro(outputs: ModelOutputs, batch: Batch, config: DROConfig) -> LossTerms:
    """Direct reward optimisation (Richemond et al. 2024, 2405.19107; Kimi k1.5, 2501.12599), per token as in verl.

    loss_t = -A_t log_probs_t + beta log(r_t)^2 / 2: no ratio multiplies the advantage and nothing is clipped; the
    square draws the policy back to the one that sampled. Metrics: those of `finish_policy_loss`.
    """
    mask = policy_mask(batch)
    log_ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit)
    log_probs = outputs.log_probs.masked_fill(~mask, 0)  # type: ignore[union-attr]
    per_token = -token_advantages(batch) * log_probs + config.beta / 2 * log_ratio.square()
    return finish_policy_loss(per_token, outputs, batch, config, {})
