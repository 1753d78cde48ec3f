"""Token-level policy losses: PPO's clipped surrogate and REINFORCE.

Columns: `advantages` [rows, length] or [rows]; `old_log_probs` [rows, length]. Those of `policy_terms` are
optional.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rlhf_core import Batch, ConfigError, LossTerms, ModelOutputs, mean_of

from rlhf_algos.losses.online.terms import (
    PolicyTermsConfig,
    finish_policy_loss,
    policy_log_ratios,
    policy_mask,
    token_advantages,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOClipConfig(PolicyTermsConfig):
    """Configuration of `ppo_clip`."""

    clip_range: float = 0.2
    """The ratio is clipped below at 1 - clip_range."""
    clip_range_high: float | None = None
    """The ratio is clipped above at 1 + clip_range_high; None means clip_range. DAPO: 0.28 ("clip-higher")."""
    dual_clip: float | None = None
    """With a negative advantage the loss is at most dual_clip * |advantage| (Ye et al. 2020). verl: 3; TRL's
    `delta`; OpenRLHF: optional. None switches it off."""

    def __post_init__(self) -> None:
        PolicyTermsConfig.__post_init__(self)
        if not 0 <= self.clip_range <= 1:
            raise ConfigError(f"policy loss: clip_range must be in [0, 1], got {self.clip_range}")
        if self.clip_range_high is not None and self.clip_range_high < 0:
            raise ConfigError(f"policy loss: clip_range_high must not be negative, got {self.clip_range_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"policy loss: dual_clip must be above 1, got {self.dual_clip}; 3 is usual")

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the clipped ratio."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return 1 - self.clip_range, 1 + high


def ppo_clip(outputs: ModelOutputs, batch: Batch, config: PPOClipConfig) -> LossTerms:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), per token.

    loss_t = max(-A_t r_t, -A_t clip(r_t, 1 - clip_range, 1 + clip_range_high)) with the ratio
    r_t = exp(log_probs - old_log_probs); with dual clip, loss_t <= dual_clip * |A_t| where A_t < 0. GRPO, Dr. GRPO
    and DAPO are this loss with their own advantages and aggregation.

    Metrics: policy_loss, clip_fraction (tokens whose gradient the clip removed), dual_clip_fraction, ratio,
    approx_kl, entropy, kl.
    """
    advantages = token_advantages(batch)
    ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit).exp()
    low, high = config.bounds
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(low, high)
    per_token = torch.maximum(plain, clipped)
    mask = policy_mask(batch)
    metrics = {"clip_fraction": mean_of((clipped > plain).float(), mask)}
    if config.dual_clip is not None:
        ceiling = -advantages * config.dual_clip
        capped = (advantages < 0) & (per_token > ceiling)
        per_token = torch.where(capped, ceiling, per_token)
        metrics["dual_clip_fraction"] = mean_of(capped.float(), mask)
    return finish_policy_loss(per_token, outputs, batch, config, metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforceConfig(PolicyTermsConfig):
    """Configuration of `reinforce`."""


def reinforce(outputs: ModelOutputs, batch: Batch, config: ReinforceConfig) -> LossTerms:
    """REINFORCE (Williams 1992): loss_t = -A_t log_probs_t. No ratio: for one step per batch of samples."""
    mask = policy_mask(batch)
    log_probs = outputs.log_probs.masked_fill(~mask, 0)  # type: ignore[union-attr]
    return finish_policy_loss(-token_advantages(batch) * log_probs, outputs, batch, config, {})
