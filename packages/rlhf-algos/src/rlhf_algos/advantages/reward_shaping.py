"""From one score per response to one reward per token: normalisation, penalties, and where the score is put."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from rlhf_core import Batch, ConfigError, Mean, mean_of
from torch import Tensor

from rlhf_algos.kl import KLEstimator, kl_estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardShaping:
    """What happens to the scores, in this order: truncation penalty, overlong penalty, normalisation, clipping."""

    clip: tuple[float, float] | None = None
    """Scores are clamped to this range."""
    clip_after_baseline: bool = False
    """False: the score itself is clamped, before any baseline or group statistic (TRL's RLOO). True: what is
    left after the baseline is (OpenRLHF's `reward_clip_range`). Without a baseline, as in PPO, it is the same."""
    normalize: bool = False
    """Scores to zero mean and unit standard deviation over the batch."""
    overlong_max_length: int | None = None
    """Response length in tokens at which DAPO's soft penalty reaches its full size; None switches it off."""
    overlong_buffer: int = 0
    """Tokens before `overlong_max_length` over which the penalty grows from 0."""
    overlong_penalty: float = 1.0
    """Size of the full overlong penalty."""
    overlong_grows: bool = False
    """Past `overlong_max_length` the penalty goes on growing (verl), and does not stay at its full size."""
    truncation_score: float | None = None
    """Score that replaces the one of a truncated response (column `truncated`, [rows] bool)."""
    truncation_penalty: float = 0.0
    """Subtracted from the score of a truncated response."""
    truncation_factor: float = 1.0
    """The score of a truncated response is multiplied by it first (ProRL; OpenRLHF's
    `stop_properly_penalty_coef`, which below 0 is `truncation_score` here)."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss (DAPO's overlong filtering, TRL's `mask_truncated_completions`).
    They still count in group statistics and, under a mean over rows, as an empty row."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ConfigError(f"rewards: clip must be (low, high) with low < high, got {self.clip}")
        if self.overlong_max_length is not None and not 0 < self.overlong_buffer <= self.overlong_max_length:
            raise ConfigError(
                "rewards: overlong_buffer must be between 1 and overlong_max_length, got "
                f"{self.overlong_buffer} of {self.overlong_max_length}"
            )

    @property
    def changes_scores(self) -> bool:
        """True if scores are not left as they are."""
        penalties = self.truncation_score is not None or bool(self.truncation_penalty)
        penalties = penalties or self.truncation_factor != 1
        return penalties or self.normalize or self.clip is not None or self.overlong_max_length is not None

    @property
    def needs_truncated(self) -> bool:
        """True if the batch must have the column `truncated`."""
        changed = self.truncation_score is not None or bool(self.truncation_penalty) or self.truncation_factor != 1
        return changed or self.mask_truncated


def shape_scores(
    scores: Float[Tensor, " rows"], batch: Batch, shaping: RewardShaping, *, has_baseline: bool = False
) -> tuple[Float[Tensor, " rows"], Batch, dict[str, Mean]]:
    """Apply `shaping`: the new scores, the batch (its response mask cut if truncated rows are masked), metrics.

    `has_baseline`: the caller subtracts a baseline and clips afterwards if `clip_after_baseline`.
    """
    metrics: dict[str, Mean] = {"score": mean_of(scores)}
    scores = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
    if shaping.needs_truncated:
        truncated = batch["truncated"].bool()
        if shaping.truncation_score is not None:
            scores = torch.where(truncated, shaping.truncation_score, scores)
        scores = torch.where(truncated, shaping.truncation_factor * scores, scores)
        scores = scores - shaping.truncation_penalty * truncated
        metrics["truncated"] = mean_of(truncated.float())
    if shaping.overlong_max_length is not None:
        penalty = overlong_penalty(
            batch.response_mask.sum(dim=1),
            max_length=shaping.overlong_max_length,
            buffer=shaping.overlong_buffer,
            penalty=shaping.overlong_penalty,
            grows=shaping.overlong_grows,
        )
        scores = scores + penalty
        metrics["overlong_penalty"] = mean_of(penalty)
    if shaping.normalize:
        scores = (scores - scores.mean()) / scores.std(correction=0).clamp(min=1e-8)
    if shaping.clip is not None and not (shaping.clip_after_baseline and has_baseline):
        low, high = shaping.clip
        metrics["score_clipped"] = mean_of(((scores < low) | (scores > high)).float())
        scores = scores.clamp(low, high)
    if shaping.mask_truncated:
        keep = ~batch["truncated"].bool().unsqueeze(1)
        batch = replace(batch, response_mask=batch.response_mask & keep)
    return scores, batch, metrics


def overlong_penalty(
    lengths: Tensor, *, max_length: int, buffer: int, penalty: float = 1.0, grows: bool = False
) -> Float[Tensor, " rows"]:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), at most 0.

    0 up to max_length - buffer, then linear in the excess, -penalty at max_length. From there on it stays so, or
    goes on growing if `grows` (verl); with max_length as the limit of generation no response is longer.

    >>> overlong_penalty(torch.tensor([6, 9, 10, 12]), max_length=10, buffer=2)
    tensor([-0.0000, -0.5000, -1.0000, -1.0000])
    """
    excess = (lengths - (max_length - buffer)).float() / buffer
    return -penalty * excess.clamp(0, math.inf if grows else 1)


def place_scores(
    scores: Float[Tensor, " rows"], response_mask: Bool[Tensor, "rows length"]
) -> Float[Tensor, "rows length"]:
    """Each score on the last sampled token of its row, zero elsewhere. A row without one gets no reward at all."""
    length = response_mask.shape[1]
    positions = torch.arange(length, device=response_mask.device)
    last = torch.where(response_mask, positions, -1).max(dim=1).values
    return torch.where(positions == last.unsqueeze(1), scores.unsqueeze(1), 0.0)


def placed_rewards(scores: Float[Tensor, " rows"], batch: Batch) -> Float[Tensor, "rows length"]:
    """Each score as rewards of tokens: where the column `rewards` says that parts of it fell, the rest at the end.

    Column `rewards` [rows, length], optional: rewards of single turns or steps. The sum over a row is its score,
    whatever shaping or normalisation has made of it; a row without a sampled token gets no reward at all.
    """
    mask = batch.response_mask
    placed = place_scores(scores, mask)
    if "rewards" not in batch:
        return placed
    steps = batch["rewards"].to(scores.dtype).masked_fill(~mask, 0)
    rest = scores - steps.sum(dim=1)
    # What rounding leaves of a score that is the sum of its steps is no reward.
    rest = torch.where(rest.abs() <= 1e-6 * scores.abs().clamp(min=1), 0.0, rest)
    return steps + place_scores(rest, mask)


def token_kl(
    batch: Batch,
    estimator: KLEstimator = "k1",
    *,
    value_limit: float = math.inf,
    log_ratio_limit: float = 20.0,
) -> Float[Tensor, "rows length"]:
    """KL(policy before the step || reference) at each sampled token, zero elsewhere: a penalty on its reward.

    Columns: `old_log_probs`, `ref_log_probs` [rows, length]. The clamps are those of `kl_estimate`.

    Raises:
        ConfigError: the batch was not scored with the policy and the reference.
    """
    for name, role in (("ref_log_probs", "reference"), ("old_log_probs", "policy")):
        if name not in batch:
            raise ConfigError(f"a KL penalty needs the column {name!r}; score the batch with the {role}")
    mask = batch.response_mask
    return kl_estimate(
        batch["old_log_probs"].masked_fill(~mask, 0),
        batch["ref_log_probs"].masked_fill(~mask, 0),
        estimator,
        log_ratio_limit=log_ratio_limit,
        value_limit=value_limit,
    )
