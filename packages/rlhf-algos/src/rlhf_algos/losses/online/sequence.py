"""Policy losses with one ratio per response: GSPO and GMPO. Columns as in `policy_losses`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rlhf_core import Batch, ConfigError, LossTerms, ModelOutputs, mean_of

from rlhf_algos.losses.aggregation import Aggregation
from rlhf_algos.losses.online.clipped import PPOClipConfig
from rlhf_algos.losses.online.terms import (
    PolicyTermsConfig,
    finish_policy_loss,
    policy_log_ratios,
    policy_mask,
    sequence_log_ratio,
    token_advantages,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPOConfig(PPOClipConfig):
    """Configuration of `gspo`; the clip range is the paper's, far narrower than PPO's. Change both sides of it."""

    aggregation: Aggregation = "seq_mean_token_mean"
    clip_range: float = 3e-4
    clip_range_high: float | None = 4e-4
    length_normalized: bool = True
    """True: the geometric mean of the token ratios (GSPO). False: their product, the ratio of the whole response,
    as in TRL's RLOO trainer; use PPO's clip range with it."""
    token_form: bool = False
    """GSPO-token (eq. 13): the value of the sequence's ratio with the gradient of the token's own. Needed for
    advantages that differ within a response; with equal ones the gradient is the same. verl uses this form, TRL the
    other (`importance_sampling_level="sequence"`)."""


def gspo(outputs: ModelOutputs, batch: Batch, config: GSPOConfig) -> LossTerms:
    """Group sequence policy optimization (Zheng et al. 2025, eq. 5).

    PPO's clipped surrogate with s_i = exp(mean_t(log_probs - old_log_probs)) in place of the token's ratio.
    Metrics as for `ppo_clip`.
    """
    mask, advantages = policy_mask(batch), token_advantages(batch)
    token_log_ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit)
    log_ratio = sequence_log_ratio(token_log_ratio, mask)
    if not config.length_normalized:
        log_ratio = token_log_ratio.sum(dim=1, keepdim=True).clamp(-config.log_ratio_limit, config.log_ratio_limit)
    if config.token_form:
        log_ratio = log_ratio.detach() + token_log_ratio - token_log_ratio.detach()
    ratio = log_ratio.exp()
    low, high = config.bounds
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(low, high)
    per_token = torch.maximum(plain, clipped)
    if config.dual_clip is not None:
        per_token = torch.where(advantages < 0, torch.minimum(per_token, -advantages * config.dual_clip), per_token)
    metrics = {
        "clip_fraction": mean_of((clipped > plain).float(), mask),
        "sequence_ratio": mean_of(ratio.expand(mask.shape), mask),
    }
    return finish_policy_loss(per_token, outputs, batch, config, metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class GMPOConfig(PolicyTermsConfig):
    """Configuration of `gmpo`."""

    aggregation: Aggregation = "seq_mean_token_mean"
    clip_range: float = 0.4
    """Log-ratios are clipped below at -clip_range: ratios at exp(-0.4)."""
    clip_range_high: float | None = None
    """Log-ratios are clipped above at this; None means clip_range."""

    def __post_init__(self) -> None:
        PolicyTermsConfig.__post_init__(self)
        if self.clip_range < 0 or (self.clip_range_high or 0) < 0:
            raise ConfigError(
                f"gmpo: clip ranges must not be negative, got {self.clip_range}, {self.clip_range_high}"
            )


def gmpo(outputs: ModelOutputs, batch: Batch, config: GMPOConfig) -> LossTerms:
    """Geometric-mean policy optimization (Zhao et al. 2025, eq. 4).

    loss_i = -A_i exp(mean_t l_t), where l_t is the log-ratio clipped to [-clip_range, clip_range_high] on the side
    that PPO clips: above where A > 0, below where A < 0. Metrics: clip_fraction and those of `finish_policy_loss`.
    """
    mask, advantages = policy_mask(batch), token_advantages(batch)
    log_ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit)
    high = config.clip_range if config.clip_range_high is None else config.clip_range_high
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-config.clip_range))
    per_token = -advantages * sequence_log_ratio(clipped, mask).exp()
    metrics = {"clip_fraction": mean_of((clipped != log_ratio).float(), mask)}
    return finish_policy_loss(per_token, outputs, batch, config, metrics)
