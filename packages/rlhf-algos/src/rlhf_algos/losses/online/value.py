"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rlhf_core import Batch, ConfigError, LossTerms, Mean, ModelOutputs, mean_of

from rlhf_algos.losses.aggregation import EPISODE_SHARE, Aggregation, aggregate, check_aggregation


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueClipConfig:
    """Configuration of `value_clip`."""

    clip_range: float | None = 0.2
    """New values are clipped to this distance from the old ones; None switches clipping off. OpenRLHF and verl clip
    at 0.5 by default, TRL's former PPO at 0.2."""
    aggregation: Aggregation = "token_mean"
    max_length: int = 0
    """Divisor of the aggregation `max_length`, in tokens."""
    count_empty_rows: bool = True
    """See `PolicyTermsConfig`."""

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length)
        if self.clip_range is not None and self.clip_range <= 0:
            raise ConfigError(f"value loss: clip_range must be positive or None, got {self.clip_range}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("values",)


def value_clip(outputs: ModelOutputs, batch: Batch, config: ValueClipConfig) -> LossTerms:
    """Half the larger of the squared errors of the value and of the clipped value, per token.

    loss_t = max((v - R)^2, (clip(v, v_old +- clip_range) - R)^2) / 2. Columns: `returns`, and `old_values` if
    clipping, both [rows, length]. Metrics: value_loss, value_clip_fraction, value_mean, explained-variance parts
    `value_error` (mean squared error) and `returns_mean`.
    """
    if outputs.values is None:
        raise ConfigError("value_clip needs values; use Loss(..., outputs=('values',))")
    mask = batch.response_mask
    values = outputs.values.masked_fill(~mask, 0)
    returns = batch["returns"].masked_fill(~mask, 0)
    error = (values - returns).square()
    metrics = {
        "value_mean": mean_of(values, mask),
        "value_error": mean_of(error, mask),
        "returns_mean": mean_of(returns, mask),
    }
    if config.clip_range is not None:
        old = batch["old_values"].masked_fill(~mask, 0)
        change = values - old
        # A value within the range stays what it is: old + (value - old) would be off by rounding.
        clipped = torch.where(
            change.abs() <= config.clip_range, values, old + change.clamp(-config.clip_range, config.clip_range)
        )
        clipped_error = (clipped - returns).square()
        metrics["value_clip_fraction"] = mean_of((clipped_error > error).float(), mask)
        error = torch.maximum(error, clipped_error)
    total, weight = aggregate(
        error / 2,
        mask,
        config.aggregation,
        max_length=config.max_length,
        count_empty_rows=config.count_empty_rows,
        prompt_tokens=batch.columns.get("prompt_tokens"),
        episode_share=batch.columns.get(EPISODE_SHARE),
    )
    metrics["value_loss"] = Mean(total=float(total.detach()), weight=float(weight))
    return LossTerms(total=total, weight=weight, metrics=metrics)
