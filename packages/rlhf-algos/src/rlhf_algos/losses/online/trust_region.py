"""Policy losses that leave out tokens by how far their probability moved, not by its ratio: DPPO.

Columns as for `ppo_clip`; `old_log_probs` are best the sampler's own (recipe field `old_log_probs: sampler`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from rlhf_core import Batch, ConfigError, LossTerms, ModelOutputs, mean_of
from torch import Tensor

from rlhf_algos.choices import check_choices
from rlhf_algos.losses.online.terms import (
    PolicyTermsConfig,
    finish_policy_loss,
    policy_log_ratios,
    policy_mask,
    token_advantages,
)

BinaryDivergence = Literal["tv", "kl"]
"""Distance between old and new policy that looks at the sampled token against all others, with p its probability:
`tv`: |p - p_old|, the total variation; `kl`: KL((p_old, 1 - p_old) || (p, 1 - p))."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DPPOConfig(PolicyTermsConfig):
    """Configuration of `dppo`."""

    divergence: BinaryDivergence = "tv"
    """See `BinaryDivergence`."""
    limit_low: float = 0.2
    """Divergence beyond which a token that lost probability is left out."""
    limit_high: float | None = None
    """Divergence beyond which a token that gained probability is left out; None means limit_low."""
    symmetric: bool = False
    """False: a token is left out where the step would carry it further away, as the sign of its advantage says.
    True: wherever it is beyond the limit (prime-rl's `ipo` loss)."""
    ratio_high: float | None = 20.0
    """Upper bound of the ratio, without a gradient (verl: 20); None means no bound."""
    log_ratio_coef: float = 0.0
    """Weight of the squared log-ratio of every token, left out or not (Kimi K2.5; prime-rl: 1e-3)."""

    def __post_init__(self) -> None:
        PolicyTermsConfig.__post_init__(self)
        check_choices("dppo", self, divergence=BinaryDivergence)
        for name in ("limit_low", "limit_high", "ratio_high"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"dppo: {name} must be positive, got {getattr(self, name)}")


def dppo(outputs: ModelOutputs, batch: Batch, config: DPPOConfig) -> LossTerms:
    """Divergence proximal policy optimization (2602.04879).

    loss_t = -m_t r_t A_t + log_ratio_coef log(r_t)^2, with the ratio r_t = exp(log_probs - old_log_probs) and m_t
    = 0 where the token is out of the trust region: where A_t > 0 and its probability rose by more than the limit,
    or A_t < 0 and it fell by more. A ratio says little of a rare token, whose probability hardly moves when it
    doubles, and much of a likely one. Tokens left out still count in the mean.

    Metrics: clip_fraction (tokens left out) and those of `finish_policy_loss`.
    """
    mask, advantages = policy_mask(batch), token_advantages(batch)
    log_ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit)
    inside = _inside(outputs, batch, config)
    ratio = log_ratio.detach().exp()
    if config.ratio_high is not None:
        ratio = ratio.clamp(max=config.ratio_high)
    # The value of the ratio, bounded, with the gradient of the log-prob: one that a bound does not take away.
    surrogate = ratio * (1 + log_ratio - log_ratio.detach())
    per_token = -advantages * surrogate * inside
    metrics = {"clip_fraction": mean_of((~inside).float(), mask)}
    penalty = config.log_ratio_coef * log_ratio.square() if config.log_ratio_coef else None
    return finish_policy_loss(per_token, outputs, batch, config, metrics, penalty=penalty)


def _inside(outputs: ModelOutputs, batch: Batch, config: DPPOConfig) -> Bool[Tensor, "rows length"]:
    mask, advantages = policy_mask(batch), token_advantages(batch)
    log_probs = outputs.log_probs.detach().masked_fill(~mask, 0)  # type: ignore[union-attr]
    old = batch["old_log_probs"].masked_fill(~mask, 0) if "old_log_probs" in batch else log_probs
    moved = _divergence(old, log_probs, config.divergence)
    rose = log_probs > old
    high = config.limit_low if config.limit_high is None else config.limit_high
    beyond = moved > torch.full_like(moved, config.limit_low).masked_fill(rose, high)
    further = torch.ones_like(rose) if config.symmetric else torch.where(rose, advantages > 0, advantages < 0)
    return ~(beyond & further)


def _divergence(old: Tensor, new: Tensor, kind: BinaryDivergence) -> Float[Tensor, "rows length"]:
    p_old, p_new = old.clamp(max=0).exp(), new.clamp(max=0).exp()
    if kind == "tv":
        return (p_new - p_old).abs()
    most = 1 - torch.finfo(p_old.dtype).eps
    rest_old, rest_new = (torch.log1p(-p.clamp(max=most)) for p in (p_old, p_new))
    return p_old * (old - new) + (1 - p_old) * (rest_old - rest_new)
