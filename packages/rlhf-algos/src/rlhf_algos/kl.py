"""Divergence from the reference policy: estimators and the controllers of its coefficient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Protocol, get_args

import torch
from jaxtyping import Float
from rlhf_core import ConfigError
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "abs"]
"""Estimators of KL(policy || reference) from one sampled token, d = log_probs - ref_log_probs.

k1 = d: unbiased, of either sign; its gradient, inside a loss, is zero in expectation.
k2 = d^2 / 2: biased, positive; its gradient is that of the true KL (on-policy).
k3 = exp(-d) - 1 + d: unbiased and positive.
abs = |d|.
(J. Schulman, Approximating KL divergence, 2020.)
"""

KLGradient = Literal["own", "k2"]
"""`own`: differentiate the estimator; `k2`: keep its value but use k2's gradient (verl's `k3+`)."""


def kl_estimate(
    log_probs: Float[Tensor, "*shape"],
    ref_log_probs: Float[Tensor, "*shape"],
    estimator: KLEstimator = "k1",
    *,
    gradient: KLGradient = "own",
    log_ratio_limit: float = 20.0,
    value_limit: float = math.inf,
) -> Float[Tensor, "*shape"]:
    """Estimate of KL(policy || reference) per token, in nats.

    Args:
        log_probs: of the sampled tokens under the policy.
        ref_log_probs: of the same tokens under the reference.
        estimator: see `KLEstimator`.
        gradient: see `KLGradient`.
        log_ratio_limit: d is clamped to this range before the exponential of k3, so that it stays finite. verl
            clamps at 20; TRL and OpenRLHF do not (`math.inf`).
        value_limit: the estimate itself is clamped to this range. Recent OpenRLHF clamps every estimator and verl
            its k3 (`low_var_kl`) at 10; TRL does not.

    >>> kl_estimate(torch.tensor(0.0), torch.tensor(-1.0), "k3").item()
    0.3678794503211975
    """
    if estimator not in get_args(KLEstimator):
        raise ConfigError(
            f"kl_estimator: {estimator!r} is unknown; write one of {', '.join(get_args(KLEstimator))}"
        )
    difference = log_probs - ref_log_probs
    if estimator == "k1":
        value = difference
    elif estimator == "abs":
        value = difference.abs()
    elif estimator == "k2":
        value = difference.square() / 2
    else:
        limited = difference.clamp(-log_ratio_limit, log_ratio_limit)
        value = torch.expm1(-limited) + limited
    value = value.clamp(-value_limit, value_limit)
    if gradient == "k2":
        square = difference.square() / 2
        value = value.detach() + square - square.detach()
    return value


def full_kl(
    logits: Float[Tensor, "*shape vocab"], ref_logits: Float[Tensor, "*shape vocab"]
) -> Float[Tensor, "*shape"]:
    """KL(softmax(logits) || softmax(ref_logits)) over the whole vocabulary, in nats: no sampling noise."""
    log_p, log_q = logits.log_softmax(dim=-1), ref_logits.log_softmax(dim=-1)
    # A token that both exclude (-inf) contributes nothing; inf - inf would be NaN.
    return torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q)).sum(dim=-1)


class KLController(Protocol):
    """The coefficient of the KL penalty over the course of training."""

    @property
    def value(self) -> float:
        """The coefficient for the next step."""
        ...

    def update(self, kl: float, samples: int) -> None:
        """Take note of a step's mean KL (nats) over `samples` sequences."""
        ...

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`."""
        ...


class FixedKL:
    """A constant coefficient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, kl: float, samples: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Nothing changes: the configured value wins, so that a resumed run can set another."""


class AdaptiveKL:
    """Proportional controller that steers the KL to a target (Ziegler et al. 2019, section 2.2).

    value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)
    """

    def __init__(self, value: float, *, target: float, horizon: int = 10_000) -> None:
        if target <= 0 or horizon <= 0:
            raise ConfigError(
                f"adaptive KL: target and horizon must be positive, got target={target}, horizon={horizon}"
            )
        self.value = value
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Move towards the target; a KL that is not finite is ignored."""
        if not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The current coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with the saved coefficient."""
        self.value = float(state["value"])
