"""Correction for samples that another policy drew: the sampler differs from the trainer, or its weights are older.

The importance ratio of a token is exp(old_log_probs - rollout_log_probs): trainer's numerics over sampler's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from rlhf_core import Batch, ConfigError, Mean, masked_mean, mean_of
from torch import Tensor

from rlhf_algos.choices import check_choices
from rlhf_algos.mismatch import LOG_RATIO_LIMIT, mismatch_log_ratio, mismatch_metrics

RatioLevel = Literal["token", "sequence", "geometric", "max"]
"""What is compared with the bounds, with the statistic `ratio`: the ratio of each `token`; of the response, the
product over it (`sequence`); its geometric mean. With `k2` and `k3`: the estimate of each token, its sum over the
response (`sequence`), its mean (`geometric`), or its largest (`max`)."""

Statistic = Literal["ratio", "k2", "k3"]
"""`ratio`: trainer over sampler. With d its logarithm, k2 = d^2 / 2 and k3 = exp(d) - 1 - d estimate
KL(sampler || trainer); they are never negative and have an upper bound alone."""

CorrectionMode = Literal["truncate", "mask", "reject"]
"""`truncate`: clamp the ratio into the bounds; `mask`: the ratio inside the bounds, 0 outside; `reject`: 1 inside
the bounds, 0 outside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyCorrection:
    """One importance weight per token. Several corrections multiply.

    - Truncated importance sampling (TIS, Yao et al. 2025): `level="token", mode="truncate", high=2`. One-sided in
      verl, two-sided (with `low`) in OpenRLHF and optionally in TRL.
    - Masked importance sampling (MIS, Liu et al. 2025): `mode="mask"` at level token or sequence (TRL's
      `token_mask`, `sequence_mask`).
    - IcePop (Ling team 2025): `level="token", mode="mask", low=0.5, high=5`.
    - Geometric rejection (KPop, TRM 2512.23075): `level="geometric", mode="reject"` with bounds near 1.
    - verl's `rollout_rs`: `mode="reject", drop=True` with `statistic` `k2` or `k3` at level token, sequence
      (`seq_sum`), geometric (`seq_mean`) or max (`seq_max`), or with the ratio, whose inverse verl bounds.
    - OpenRLHF's `seq-mask-tis`: a geometric `reject` and a token `truncate` with `high=None` (there, the token's
      ratio is not clamped; giving `high` a number clamps it).
    """

    level: RatioLevel = "token"
    mode: CorrectionMode = "truncate"
    statistic: Statistic = "ratio"
    """See `Statistic`; `k2` and `k3` only reject."""
    low: float | None = None
    """Lower bound of the ratio; None means 0."""
    high: float | None = 2.0
    """Upper bound of the ratio, or of `k2` and `k3`; None means no bound."""
    normalize: bool = False
    """Divide the weights by their mean over the batch, of tokens or, at the other levels, of responses, so that
    they are one on average (verl's `rollout_is_batch_normalize`)."""
    drop: bool = False
    """Whether a token of weight 0 also leaves the response mask, hence the denominator of the loss: True for
    verl's rejection, False in TRL and OpenRLHF, where it counts as a zero."""

    def __post_init__(self) -> None:
        check_choices("off-policy", self, level=RatioLevel, mode=CorrectionMode, statistic=Statistic)
        if self.statistic != "ratio" and (self.mode != "reject" or self.low is not None):
            raise ConfigError(
                f"off-policy: {self.statistic} is no importance weight and has no lower bound; write mode: reject "
                "with high alone, beside another correction that weighs"
            )
        if self.statistic == "ratio" and self.level == "max":
            raise ConfigError("off-policy: level 'max' is for statistic k2 or k3; write one of these")
        low, high = self.bounds
        if not 0 <= low <= high:
            raise ConfigError(f"off-policy: needs 0 <= low <= high, got low={self.low}, high={self.high}")

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio."""
        return self.low or 0.0, math.inf if self.high is None else self.high

    def weights(
        self, log_ratio: Float[Tensor, "rows length"], mask: Bool[Tensor, "rows length"]
    ) -> Float[Tensor, "rows length"]:
        """Importance weight of each token, zero where masked.

        Args:
            log_ratio: old_log_probs - rollout_log_probs, zero where masked.
            mask: the response mask.

        The bounds of the ratio are compared in log space; the ratio itself is limited to exp(+-20), so that a
        response that the trainer finds impossible, or certain, does not become an infinity."""
        if self.statistic != "ratio":
            estimate = _at_level(_estimate(log_ratio, self.statistic), mask, self.level)
            weights = ((estimate <= self.bounds[1]) & mask).to(log_ratio.dtype)
        else:
            log_ratio = _at_level(log_ratio, mask, self.level)
            ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            low, high = self.bounds
            if self.mode == "truncate":
                weights = ratio.clamp(low, high).masked_fill(~mask, 0)
            else:
                inside = (log_ratio >= _log(low)) & (log_ratio <= _log(high)) & mask
                weights = torch.where(inside, ratio if self.mode == "mask" else 1.0, 0.0)
        return self._normalized(weights, mask) if self.normalize else weights

    def _normalized(self, weights: Tensor, mask: Tensor) -> Tensor:
        if self.level == "token":
            mean = masked_mean(weights, mask)
        else:
            rows = mask.any(dim=1)
            mean = masked_mean(masked_mean(weights, mask, dim=1), rows)
        return weights / torch.where(mean > 1e-8, mean, 1.0)


def correct_off_policy(batch: Batch, corrections: Sequence[OffPolicyCorrection]) -> tuple[Batch, dict[str, Mean]]:
    """Add the column `importance_weights`, which every policy loss multiplies onto its policy term.

    Columns: `old_log_probs`, `rollout_log_probs` [rows, length]. A sampled token whose rollout log-prob is NaN
    (the sampler did not say) gets ratio 1. Metrics: those of `mismatch_metrics`, off_policy_weight,
    off_policy_masked (share of tokens with weight 0) and effective_sample_size (of the weights, share in (0, 1]).
    """
    mask = batch.response_mask
    log_ratio = mismatch_log_ratio(batch["old_log_probs"], batch["rollout_log_probs"], mask)
    metrics = mismatch_metrics(log_ratio, mask)
    weights, kept = mask.to(log_ratio.dtype), mask
    for correction in corrections:
        weight = correction.weights(log_ratio, mask)
        weights = weights * weight
        if correction.drop:
            kept = kept & (weight > 0)
    if corrections:
        metrics["off_policy_weight"] = mean_of(weights, mask)
        metrics["off_policy_masked"] = mean_of((weights == 0).float(), mask)
        metrics["effective_sample_size"] = Mean(total=effective_sample_size(weights, mask), weight=1.0)
        batch = replace(batch.with_columns(importance_weights=weights), response_mask=kept)
    return batch, metrics


def _estimate(log_ratio: Tensor, statistic: Statistic) -> Tensor:
    if statistic == "k2":
        return log_ratio.square() / 2
    limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(limited) - limited


def _at_level(values: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """Values that are zero where masked, as each token's own or as the response's on all its tokens."""
    if level == "token":
        return values
    if level == "max":
        # Only k2 and k3 come here, which are never negative.
        return values.max(dim=1, keepdim=True).values.expand(mask.shape)
    total = values.sum(dim=1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return total.expand(mask.shape)


def effective_sample_size(weights: Float[Tensor, "rows length"], mask: Bool[Tensor, "rows length"]) -> float:
    """(sum w)^2 / (n sum w^2) over the counted tokens (Kish 1965): 1 for equal weights, 0 if all are zero."""
    kept = weights.masked_fill(~mask, 0).double()
    squares = float(kept.square().sum() * mask.sum())
    return float(kept.sum()) ** 2 / squares if squares else 0.0


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
