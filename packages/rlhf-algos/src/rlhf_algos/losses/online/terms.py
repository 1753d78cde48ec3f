"""What all policy losses share: ratios, KL and entropy terms, importance weights and the reduction to a sum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from rlhf_core import (
    Batch,
    ConfigError,
    Largest,
    LossTerms,
    Mean,
    Metric,
    ModelOutputs,
    masked_mean,
    masked_sum,
    mean_of,
)
from torch import Tensor

from rlhf_algos.kl import KLEstimator, KLGradient, kl_estimate
from rlhf_algos.losses.aggregation import EPISODE_SHARE, Aggregation, add_aux_loss, aggregate, check_aggregation
from rlhf_algos.mismatch import mismatch_log_ratio, mismatch_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTermsConfig:
    """Fields of every policy loss."""

    aggregation: Aggregation = "token_mean"
    """See `rlhf_algos.losses.aggregation`."""
    max_length: int = 0
    """Divisor of the aggregation `max_length`, in tokens."""
    count_empty_rows: bool = True
    """Whether a row without a counted token is part of a mean over rows: True in TRL; False in OpenRLHF, verl."""
    kl_coef: float = 0.0
    """Weight of the KL term in the loss; needs the column `ref_log_probs`. 0 if the KL is in the reward."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL term. GRPO and TRL use k3; OpenRLHF takes k2 or k3 in the loss."""
    kl_gradient: KLGradient = "own"
    """`k2` keeps the estimator's value and uses k2's gradient (verl's `k3+`)."""
    kl_value_limit: float = math.inf
    """Clamp on the KL per token: 10 in OpenRLHF and in verl's k3, none in TRL."""
    kl_log_ratio_limit: float = 20.0
    """log(policy / reference) is clamped to this range before the exponential of k3. verl clamps at 20; TRL and
    OpenRLHF do not (`math.inf`)."""
    kl_ratio_weighted: bool = False
    """Multiply the KL by the token's ratio, which makes its gradient unbiased off-policy (DeepSeek-V3.2; TRL's
    `use_bias_correction_kl`)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, in the policy term's own aggregation (as in verl). TRL takes the mean over
    tokens whatever the aggregation of the policy term."""
    aux_loss_coef: float = 0.0
    """Weight of a mixture-of-experts model's router loss. That loss is a mean over a forward pass, not a sum over
    tokens, so it is the one term that depends on how micro-batches are cut."""
    top_entropy: float = 1.0
    """Share of the tokens of the batch, those of highest entropy, whose policy term counts: 0.2 in Wang et al. 2025
    (2506.01939; TRL's `top_entropy_quantile`). The others stay in the mean. Needs the column `old_entropy`."""
    sequence_kl_limit: float | None = None
    """Off-policy sequence masking (DeepSeek-V3.2, 2512.02556, eq. 9; TRL's `off_policy_mask_threshold`): a response
    leaves the policy term where its advantage is negative and the mean of log(sampler / policy) over its tokens is
    above this. It stays in the mean. None switches it off."""
    log_ratio_limit: float = 20.0
    """log(policy / old policy) is clamped to this range before the exponential, so that the ratio stays finite.
    verl and OpenRLHF's PPO clamp at 20; TRL and OpenRLHF's GSPO do not (`math.inf`)."""

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length)
        for name in ("kl_value_limit", "kl_log_ratio_limit", "log_ratio_limit"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"policy loss: {name} must be positive, got {getattr(self, name)}")

        if not 0 < self.top_entropy <= 1:
            raise ConfigError(f"policy loss: top_entropy must be in (0, 1], got {self.top_entropy}")

    def add_columns(self, batch: Batch) -> Batch:
        """Add what the loss needs to know of the whole global batch: `entropy_selected` for `top_entropy`."""
        return batch if self.top_entropy == 1 else _select_by_entropy(batch, self.top_entropy)

    @property
    def old_outputs(self) -> tuple[str, ...]:
        """Fields of ModelOutputs, beside log_probs, that the batch must have as columns `old_<field>`: what the
        policy said before the step."""
        return ("entropy",) if self.top_entropy < 1 else ()

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether `add_columns` reads `old_log_probs`. The losses themselves do without where they are those of the
        update."""
        return False

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        extra = (("entropy",) if self.entropy_coef else ()) + (("aux_loss",) if self.aux_loss_coef else ())
        return ("log_probs", *extra)


def policy_log_ratios(outputs: ModelOutputs, batch: Batch, limit: float) -> Float[Tensor, "rows length"]:
    """log_probs - old_log_probs, clamped to +-limit and zero outside the response mask.

    A batch without the column `old_log_probs` is on-policy: the ratio is 1 with the gradient of log_probs (TRL
    does this when each batch is used for one step).
    """
    log_probs = outputs.log_probs
    if log_probs is None:
        raise ConfigError("policy losses need log_probs among the engine's outputs")
    old = batch["old_log_probs"] if "old_log_probs" in batch else log_probs.detach()
    return (log_probs - old).masked_fill(~policy_mask(batch), 0).clamp(-limit, limit)


def policy_mask(batch: Batch) -> Bool[Tensor, "rows length"]:
    """The response mask without the rows that `mix_pretraining` added."""
    if "ptx_coef" not in batch:
        return batch.response_mask
    return batch.response_mask & (batch["ptx_coef"] == 0).unsqueeze(1)


def token_advantages(batch: Batch) -> Float[Tensor, "rows length"]:
    """The column `advantages` as [rows, length], zero where masked; a per-row column is spread over the tokens."""
    advantages = batch["advantages"]
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand(batch.token_ids.shape)
    return advantages.masked_fill(~policy_mask(batch), 0)


def finish_policy_loss(
    per_token: Float[Tensor, "rows length"],
    outputs: ModelOutputs,
    batch: Batch,
    config: PolicyTermsConfig,
    metrics: Mapping[str, Metric],
    *,
    penalty: Float[Tensor, "rows length"] | None = None,
) -> LossTerms:
    """Weights of the policy term, then KL and entropy terms, then the sum; metrics are completed.

    Of a batch without `old_log_probs` the metrics include what is otherwise measured before the step: those of
    `mismatch_metrics` and `reference_kl`, from the log-probs of the step itself.

    Columns read if present: `importance_weights` [rows, length] (see `OffPolicyCorrection`), multiplied onto the
    policy term only; `ref_log_probs` [rows, length] if `kl_coef` is not 0; `prompt_tokens` [rows] for the
    aggregation `prompt_mean`; `episode_share` [rows] (see `aggregate`); `ptx_coef` [rows] (see `mix_pretraining`);
    `likelihood_weight` [rows] (see `with_likelihood`).

    Args:
        per_token: the policy term.
        outputs: of the model.
        batch: a micro-batch.
        config: of the loss.
        metrics: what the loss itself measured.
        penalty: a term of the loss's own that no weight touches.
    """
    mask = policy_mask(batch)
    per_token, metrics = _weighted(per_token, outputs, batch, config, metrics)
    log_ratio = policy_log_ratios(outputs, batch, config.log_ratio_limit)
    rows = batch["ptx_coef"] == 0 if "ptx_coef" in batch else slice(None)

    def summed(values: Tensor) -> tuple[Tensor, Tensor]:
        return aggregate(
            values[rows],
            mask[rows],
            config.aggregation,
            max_length=config.max_length,
            count_empty_rows=config.count_empty_rows,
            prompt_tokens=batch["prompt_tokens"][rows] if "prompt_tokens" in batch else None,
            episode_share=batch[EPISODE_SHARE][rows] if EPISODE_SHARE in batch else None,
        )

    total, weight = summed(per_token)
    metrics = _measured_before(outputs, batch, config) | {
        "policy_loss": Mean(total=float(total.detach()), weight=float(weight)),
        "ratio": mean_of(log_ratio.exp(), mask),
        "approx_kl": mean_of(-log_ratio, mask),
        **metrics,
    }
    if penalty is not None:
        total = total + summed(penalty)[0]
    if config.kl_coef:
        kl = _kl_term(outputs, batch, config, log_ratio)
        total = total + config.kl_coef * summed(kl)[0]
        metrics["kl"] = mean_of(kl, mask)
    if outputs.entropy is not None:
        metrics["entropy"] = mean_of(outputs.entropy, mask)
        if config.entropy_coef:
            total = total - config.entropy_coef * summed(outputs.entropy)[0]
    elif config.entropy_coef:
        raise ConfigError("entropy_coef is set but the engine was not asked for 'entropy'; add it to Loss.outputs")
    if "ptx_coef" in batch:
        total = total + _ptx_term(outputs, batch, metrics)
    if "likelihood_weight" in batch:
        total = total + _likelihood_term(outputs, batch, metrics)
    return add_aux_loss(LossTerms(total=total, weight=weight, metrics=metrics), outputs, config.aux_loss_coef)


def _measured_before(outputs: ModelOutputs, batch: Batch, config: PolicyTermsConfig) -> dict[str, Metric]:
    """What a recipe measures by `old_log_probs`, of a batch whose old log-probs are those of the step itself."""
    found: dict[str, Metric] = {}
    if "old_log_probs" in batch:
        return found
    mask = policy_mask(batch)
    log_probs = outputs.log_probs.detach().masked_fill(~mask, 0)  # type: ignore[union-attr]
    if "rollout_log_probs" in batch:
        log_ratio = mismatch_log_ratio(log_probs, batch["rollout_log_probs"], mask)
        found |= mismatch_metrics(log_ratio, mask)
        found["mismatch/log_prob_max"] = Largest(value=float(log_ratio.abs().max()) if log_ratio.numel() else 0.0)
    if "ref_log_probs" in batch:
        found["reference_kl"] = mean_of(kl_estimate(log_probs, batch["ref_log_probs"], config.kl_estimator), mask)
    return found


def _weighted(
    per_token: Tensor, outputs: ModelOutputs, batch: Batch, config: PolicyTermsConfig, metrics: Mapping[str, Metric]
) -> tuple[Tensor, Mapping[str, Metric]]:
    """The policy term with the weights and masks that are its alone."""
    mask = policy_mask(batch)
    if "importance_weights" in batch:
        per_token = per_token * batch["importance_weights"].masked_fill(~mask, 0)
    if config.top_entropy < 1:
        if "entropy_selected" not in batch:
            raise ConfigError(
                "top_entropy needs the column 'entropy_selected'; call config.add_columns(batch) with the global "
                "batch"
            )
        per_token = per_token * (batch["entropy_selected"] & mask)
    if config.sequence_kl_limit is not None:
        kept = _near_sampler(outputs, batch, config.sequence_kl_limit)
        per_token = per_token * kept
        metrics = {**metrics, "sequence_masked": mean_of((~kept).float(), mask)}
    return per_token, metrics


def _near_sampler(outputs: ModelOutputs, batch: Batch, limit: float) -> Bool[Tensor, "rows length"]:
    """False where the advantage is negative and the response has become improbable."""
    mask = policy_mask(batch)
    log_probs = outputs.log_probs.detach()  # type: ignore[union-attr]
    sampler = next((batch[name] for name in ("rollout_log_probs", "old_log_probs") if name in batch), log_probs)
    gap = sampler - log_probs
    # A token whose log-prob the sampler did not say is no evidence.
    mean = masked_mean(gap.masked_fill(~mask | gap.isnan(), 0), mask, dim=1)
    return (token_advantages(batch) >= 0) | (mean <= limit).unsqueeze(1)


def _select_by_entropy(batch: Batch, share: float) -> Batch:
    """Add `entropy_selected` [rows, length]: True at the tokens whose entropy is at least the (1 -
    share)-quantile."""
    mask = policy_mask(batch)
    values = batch["old_entropy"][mask].double().sort().values
    if not len(values):
        return batch.with_columns(entropy_selected=mask)
    place = (1 - share) * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    threshold = torch.lerp(values[low], values[high], place - low)
    return batch.with_columns(entropy_selected=mask & (batch["old_entropy"] >= threshold.to(batch["old_entropy"])))


def _kl_term(outputs: ModelOutputs, batch: Batch, config: PolicyTermsConfig, log_ratio: Tensor) -> Tensor:
    mask = policy_mask(batch)
    kl = kl_estimate(
        outputs.log_probs.masked_fill(~mask, 0),  # type: ignore[union-attr]
        batch["ref_log_probs"].masked_fill(~mask, 0),
        config.kl_estimator,
        gradient=config.kl_gradient,
        log_ratio_limit=config.kl_log_ratio_limit,
        value_limit=config.kl_value_limit,
    )
    return kl * log_ratio.exp() if config.kl_ratio_weighted else kl


def _ptx_term(outputs: ModelOutputs, batch: Batch, metrics: dict[str, Metric]) -> Tensor:
    coef = batch["ptx_coef"].unsqueeze(1)
    mask = batch.response_mask & (coef != 0)
    metrics["ptx_loss"] = mean_of(-outputs.log_probs, mask)  # type: ignore[operator]
    return masked_sum(-outputs.log_probs * coef, mask)  # type: ignore[operator]


def _likelihood_term(outputs: ModelOutputs, batch: Batch, metrics: dict[str, Metric]) -> Tensor:
    weight = batch["likelihood_weight"].unsqueeze(1)
    mask = policy_mask(batch) & (weight != 0)
    metrics["likelihood_loss"] = mean_of(-outputs.log_probs, mask)  # type: ignore[operator]
    return masked_sum(-outputs.log_probs * weight, mask)  # type: ignore[operator]


def policy_weight(batch: Batch, config: PolicyTermsConfig) -> float:
    """The weight that the policy term of this batch has: what a step divides its sum by."""
    prompt_tokens, share = batch.columns.get("prompt_tokens"), batch.columns.get(EPISODE_SHARE)
    return float(
        aggregate(
            torch.zeros(batch.token_ids.shape, dtype=torch.float64),
            batch.response_mask.cpu(),
            config.aggregation,
            max_length=config.max_length,
            count_empty_rows=config.count_empty_rows,
            prompt_tokens=prompt_tokens if prompt_tokens is None else prompt_tokens.cpu(),
            episode_share=share if share is None else share.cpu(),
        )[1]
    )


def sequence_log_ratio(
    log_ratio: Float[Tensor, "rows length"], mask: Bool[Tensor, "rows length"]
) -> Float[Tensor, "rows 1"]:
    """Mean log-ratio of each response: the log of the geometric mean of its token ratios."""
    return masked_mean(log_ratio, mask, dim=1).unsqueeze(1)
