"""Policy losses that restrain the few tokens which drive the entropy down: KL-Cov and Clip-Cov (Cui et al. 2025).

A token's covariance is (A_t - mean A)(log_probs_t - mean log_probs) with means over the batch. Which tokens stand
out is a matter of the whole batch, so it is decided before the step from `old_log_probs`, by `add_columns`, and
travels as the column `cov_selected`. verl decides with the current log-probs, micro-batch by micro-batch; on the
first step of a batch these are the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from rlhf_core import Batch, ConfigError, LossTerms, ModelOutputs, masked_mean, mean_of
from torch import Tensor

from rlhf_algos.losses.online.clipped import PPOClipConfig
from rlhf_algos.losses.online.terms import (
    PolicyTermsConfig,
    finish_policy_loss,
    policy_log_ratios,
    policy_mask,
    token_advantages,
)


def token_covariance(
    advantages: Float[Tensor, "rows length"],
    log_probs: Float[Tensor, "rows length"],
    mask: Bool[Tensor, "rows length"],
) -> Float[Tensor, "rows length"]:
    """Each token's part of the covariance of advantage and log-prob; zero where masked."""
    centred = [values - masked_mean(values, mask) for values in (advantages, log_probs)]
    return (centred[0] * centred[1]).masked_fill(~mask, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class KLCovConfig(PolicyTermsConfig):
    """Configuration of `kl_cov`."""

    fraction: float = 0.0002
    """Share of the tokens, those of largest covariance, that are penalised (at least one)."""
    penalty_coef: float = 1.0
    """Weight of |log-ratio| on the selected tokens."""

    def __post_init__(self) -> None:
        PolicyTermsConfig.__post_init__(self)
        _check_fraction(self.fraction)

    @property
    def needs_old_log_probs(self) -> bool:
        """Always: `add_columns` reads them."""
        return True

    def add_columns(self, batch: Batch) -> Batch:
        """Add `cov_selected` [rows, length] bool; `batch` must be the whole global batch."""
        batch = PolicyTermsConfig.add_columns(self, batch)
        covariance = _covariance(batch)
        mask = policy_mask(batch)
        count = min(max(1, int(int(mask.sum()) * self.fraction)), int(mask.sum()))
        chosen = covariance.masked_fill(~mask, -torch.inf).flatten().topk(count).indices
        return batch.with_columns(cov_selected=_at(chosen, mask))


def kl_cov(outputs: ModelOutputs, batch: Batch, config: KLCovConfig) -> LossTerms:
    """Unclipped surrogate plus penalty_coef * |log-ratio| on the tokens of `cov_selected` (section 4.2).

    Metrics: cov_selected and those of `finish_policy_loss`.
    """
    mask, selected = policy_mask(batch), _selected(batch)
    log_ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit)
    per_token = -token_advantages(batch) * log_ratio.exp() + config.penalty_coef * log_ratio.abs() * selected
    return finish_policy_loss(per_token, outputs, batch, config, {"cov_selected": mean_of(selected.float(), mask)})


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipCovConfig(PPOClipConfig):
    """Configuration of `clip_cov`."""

    fraction: float = 0.0002
    """Share of the tokens whose gradient is removed (at least one, if any qualifies)."""
    covariance_low: float = 1.0
    """A token qualifies if its covariance lies between the two bounds."""
    covariance_high: float = 5.0
    seed: int = 0
    """Of the draw among the tokens that qualify; the draw also depends on the batch's tokens."""

    def __post_init__(self) -> None:
        PPOClipConfig.__post_init__(self)
        _check_fraction(self.fraction)
        if not self.covariance_low < self.covariance_high:
            raise ConfigError(
                f"clip_cov: needs covariance_low < covariance_high, got {self.covariance_low} and "
                f"{self.covariance_high}"
            )

    @property
    def needs_old_log_probs(self) -> bool:
        """Always: `add_columns` reads them."""
        return True

    def add_columns(self, batch: Batch) -> Batch:
        """Add `cov_selected` [rows, length] bool; `batch` must be the whole global batch."""
        batch = PolicyTermsConfig.add_columns(self, batch)
        covariance, mask = _covariance(batch), policy_mask(batch)
        inside = mask & (covariance > self.covariance_low) & (covariance < self.covariance_high)
        candidates = inside.flatten().nonzero().squeeze(1)
        count = max(1, int(int(mask.sum()) * self.fraction))
        generator = torch.Generator().manual_seed(self.seed + int(batch.token_ids.sum()))
        order = torch.randperm(len(candidates), generator=generator)[:count].to(candidates.device)
        return batch.with_columns(cov_selected=_at(candidates[order], mask))


def clip_cov(outputs: ModelOutputs, batch: Batch, config: ClipCovConfig) -> LossTerms:
    """PPO's clipped surrogate without the tokens of `cov_selected`, which still count in the mean (section 4.1).

    Metrics: cov_selected, clip_fraction and those of `finish_policy_loss`.
    """
    mask, selected, advantages = policy_mask(batch), _selected(batch), token_advantages(batch)
    ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(*config.bounds)
    per_token = torch.maximum(plain, clipped)
    if config.dual_clip is not None:
        per_token = torch.where(advantages < 0, torch.minimum(per_token, -advantages * config.dual_clip), per_token)
    metrics = {
        "cov_selected": mean_of(selected.float(), mask),
        "clip_fraction": mean_of((clipped > plain).float(), mask),
    }
    return finish_policy_loss(per_token.masked_fill(selected, 0), outputs, batch, config, metrics)


def _covariance(batch: Batch) -> Tensor:
    return token_covariance(token_advantages(batch), batch["old_log_probs"], policy_mask(batch))


def _selected(batch: Batch) -> Tensor:
    if "cov_selected" not in batch:
        raise ConfigError(
            "the covariance losses need the column 'cov_selected'; call config.add_columns(batch) with the global "
            "batch"
        )
    return batch["cov_selected"] & policy_mask(batch)


def _at(flat_indices: Tensor, mask: Tensor) -> Tensor:
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[flat_indices] = True
    return chosen.view(mask.shape) & mask


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ConfigError(f"covariance losses: fraction must be in (0, 1], got {fraction}")
