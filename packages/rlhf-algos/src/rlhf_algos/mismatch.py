"""How far sampler and trainer are apart on the same tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from rlhf_core import Mean, masked_mean, mean_of, row_parts
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this range before an exponential, so that it stays finite."""


def mismatch_log_ratio(
    trainer: Float[Tensor, "rows length"], sampler: Float[Tensor, "rows length"], mask: Bool[Tensor, "rows length"]
) -> Float[Tensor, "rows length"]:
    """The trainer's log-probs minus the sampler's, zero where masked or where the sampler gave NaN."""
    difference = trainer - sampler
    return difference.masked_fill(~mask | difference.isnan(), 0)


def mismatch_metrics(log_ratio: Float[Tensor, "rows length"], mask: Bool[Tensor, "rows length"]) -> dict[str, Mean]:
    """How far sampler and trainer are apart.

    In nats per token: mismatch_kl: KL(sampler || trainer), estimator k1; mismatch_k3: the same by k3;
    mismatch_abs: mean |log-ratio|. mismatch_chi2_token: mean square of the token ratios minus 1, an estimate
    of chi^2(trainer || sampler); mismatch_chi2_sequence: the same of whole responses, whose variance
    importance weights have; mismatch_perplexity_ratio: mean over responses of the trainer's perplexity over
    the sampler's."""
    parts = zip(row_parts(log_ratio), row_parts(mask), strict=True)
    found = [_mismatch(ratios, counted) for ratios, counted in parts]
    return {
        name: Mean(total=sum(part[name].total for part in found), weight=sum(part[name].weight for part in found))
        for name in found[0]
    }


def _mismatch(log_ratio: Float[Tensor, "rows length"], mask: Bool[Tensor, "rows length"]) -> dict[str, Mean]:
    limit, rows = LOG_RATIO_LIMIT, mask.any(dim=1)
    limited = log_ratio.clamp(-limit, limit)
    whole = log_ratio.sum(dim=1).clamp(-limit, limit)
    per_token = masked_mean(log_ratio, mask, dim=1).clamp(-limit, limit)
    return {
        "mismatch_kl": mean_of(-log_ratio, mask),
        "mismatch_k3": mean_of(torch.expm1(limited) - limited, mask),
        "mismatch_abs": mean_of(log_ratio.abs(), mask),
        "mismatch_chi2_token": mean_of(torch.expm1(2 * limited), mask),
        "mismatch_chi2_sequence": mean_of(torch.expm1(2 * whole), rows),
        "mismatch_perplexity_ratio": mean_of((-per_token).exp(), rows),
    }
