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
from rlhf_core import Batch, ConfigError, Mean, mean_of
from torch import Tensor

from rlhf_algos.choices import check_choices

RatioLevel = Literal["token", "sequence", "geometric"]
"""Ratio of each token; product over the response; geometric mean over the response."""

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
    - OpenRLHF's `seq-mask-tis`: a geometric `reject` and a token `truncate` with `high=None` (there, the token's
      ratio is not clamped; giving `high` a number clamps it).
    """

    level: RatioLevel = "token"
    mode: CorrectionMode = "truncate"
    low: float | None = None
    """Lower bound of the ratio; None means 0."""
    high: float | None = 2.0
    """Upper bound of the ratio; None means no bound."""
    drop: bool = False
    """Whether a token of weight 0 also leaves the response mask, hence the denominator of the loss: True for
    verl's rejection, False in TRL and OpenRLHF, where it counts as a zero."""

    def __post_init__(self) -> None:
        check_choices("off-policy", self, level=RatioLevel, mode=CorrectionMode)
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

        The bounds are compared in log space; the ratio itself is limited to exp(+-20), so that a response that the
        trainer finds impossible, or certain, does not become an infinity.
        """
        if self.level == "sequence":
            log_ratio = log_ratio.sum(dim=1, keepdim=True).expand(mask.shape)
        elif self.level == "geometric":
            count = mask.sum(dim=1, keepdim=True).clamp(min=1)
            log_ratio = (log_ratio.sum(dim=1, keepdim=True) / count).expand(mask.shape)
        ratio = log_ratio.clamp(-20, 20).exp()
        low, high = self.bounds
        if self.mode == "truncate":
            return ratio.clamp(low, high).masked_fill(~mask, 0)
        inside = (log_ratio >= _log(low)) & (log_ratio <= _log(high)) & mask
        return torch.where(inside, ratio if self.mode == "mask" else 1.0, 0.0)


def correct_off_policy(batch: Batch, corrections: Sequence[OffPolicyCorrection]) -> tuple[Batch, dict[str, Mean]]:
    """Add the column `importance_weights`, which every policy loss multiplies onto its policy term.

    Columns: `old_log_probs`, `rollout_log_probs` [rows, length]. A sampled token whose rollout log-prob is NaN
    (the sampler did not say) gets ratio 1. Metrics: those of `mismatch_metrics`, off_policy_weight,
    off_policy_masked (share of tokens with weight 0) and effective_sample_size (of the weights, share in (0, 1]).
    """
    mask = batch.response_mask
    log_ratio = mismatch_log_ratio(batch)
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


def mismatch_log_ratio(batch: Batch) -> Float[Tensor, "rows length"]:
    """old_log_probs - rollout_log_probs, zero where masked or where the sampler gave NaN."""
    difference = batch["old_log_probs"] - batch["rollout_log_probs"]
    return difference.masked_fill(~batch.response_mask | difference.isnan(), 0)


def mismatch_metrics(log_ratio: Float[Tensor, "rows length"], mask: Bool[Tensor, "rows length"]) -> dict[str, Mean]:
    """How far sampler and trainer are apart, in nats per token.

    mismatch_kl: KL(sampler || trainer), estimator k1; mismatch_k3: the same by k3; mismatch_abs: mean |log-ratio|.
    """
    limited = log_ratio.clamp(-20, 20)
    return {
        "mismatch_kl": mean_of(-log_ratio, mask),
        "mismatch_k3": mean_of(torch.expm1(limited) - limited, mask),
        "mismatch_abs": mean_of(log_ratio.abs(), mask),
    }


def effective_sample_size(weights: Float[Tensor, "rows length"], mask: Bool[Tensor, "rows length"]) -> float:
    """(sum w)^2 / (n sum w^2) over the counted tokens (Kish 1965): 1 for equal weights, 0 if all are zero."""
    kept = weights.masked_fill(~mask, 0).double()
    squares = float(kept.square().sum() * mask.sum())
    return float(kept.sum()) ** 2 / squares if squares else 0.0


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
