"""Policy losses with one ratio per response: GSPO, GMPO and VESPO. Columns as for `ppo_clip`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, kw_only=True, slots=True)
class VESPOConfig(PolicyTermsConfig):
    """Configuration of `vespo`; the defaults are TRL's."""

    power_positive: float = 2.0
    """k where the advantage is not negative: how fast the weight falls below a ratio of 1."""
    decay_positive: float = 3.0
    """lambda where the advantage is not negative: how fast the weight falls above it."""
    power_negative: float = 3.0
    """k where the advantage is negative."""
    decay_negative: float = 2.0
    """lambda where the advantage is negative."""

    def __post_init__(self) -> None:
        PolicyTermsConfig.__post_init__(self)
        for name in ("power_positive", "decay_positive", "power_negative", "decay_negative"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"vespo: {name} must be positive, got {getattr(self, name)}")


def vespo(outputs: ModelOutputs, batch: Batch, config: VESPOConfig) -> LossTerms:
    """Variational sequence-level soft policy optimization (2602.10693), as TRL has it.

    loss_t = -sg(w^k exp(lambda (1 - w))) A_t log_probs_t, sg being stop-gradient and w the ratio of the whole
    response, prod_t r_t, in [1e-8, exp(20)]: a gamma-shaped weight that is 1 at w = 1 and fades on both sides, on
    each as steeply as the sign of the advantage says. A column `importance_weights` [rows, length] goes into w.

    Metrics: sequence_weight and those of `finish_policy_loss`.
    """
    mask, advantages = policy_mask(batch), token_advantages(batch)
    log_ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit).detach()
    if "importance_weights" in batch:
        weights = batch["importance_weights"].masked_fill(~mask, 1)
        log_ratio = log_ratio + weights.clamp(min=_SMALLEST).log().clamp(max=20)
        columns = {name: column for name, column in batch.columns.items() if name != "importance_weights"}
        batch = replace(batch, columns=columns)
    log_w = log_ratio.sum(dim=1, keepdim=True).clamp(math.log(_SMALLEST), 20)
    positive = advantages >= 0
    power = torch.full_like(advantages, config.power_negative).masked_fill(positive, config.power_positive)
    decay = torch.full_like(advantages, config.decay_negative).masked_fill(positive, config.decay_positive)
    weight = (power * log_w + decay * (1 - log_w.exp())).exp()
    log_probs = outputs.log_probs.masked_fill(~mask, 0)  # type: ignore[union-attr]
    metrics = {"sequence_weight": mean_of(weight, mask)}
    return finish_policy_loss(-weight * advantages * log_probs, outputs, batch, config, metrics)


_SMALLEST = 1e-8  # ratio of a response below which its weight does not fall further
