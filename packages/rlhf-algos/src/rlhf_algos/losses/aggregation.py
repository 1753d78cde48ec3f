"""From one number per token to a loss: which mean, over what, and the router's loss beside it."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from rlhf_core import ConfigError, LossTerms, Mean, ModelOutputs, masked_mean, masked_sum
from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "max_length", "prompt_mean"]
"""How per-token losses become one number.

- `token_mean`: every token of the global batch counts the same (DAPO, OpenRLHF's token-level loss, verl's
  `token-mean`, TRL's `dapo`; TRL's `bnpo` is the same mean taken per micro-batch, which depends on their size).
- `seq_mean_token_mean`: mean over each response, then over responses (GRPO paper, TRL's `grpo`, verl's
  `seq-mean-token-mean`).
- `seq_mean_token_sum`: sum over each response, mean over responses (REINFORCE, TRL's `luspo`).
- `max_length`: sum over each response divided by a constant, mean over responses (Dr. GRPO; TRL's `dr_grpo` with
  the largest completion length; verl's `seq-mean-token-sum-norm` since 2026-02-26, with the padded width of the
  batch unless told otherwise; before, it divided by that alone and not by the number of responses).
- `prompt_mean`: mean over all tokens of the responses to a prompt, then over prompts (ScaleRL; for policy losses).
"""


EPISODE_SHARE = "episode_share"
"""Column [rows] of batches in which an episode may have several rows: the row's share in the episode's counted
tokens. A mean over responses is then one over episodes, whose weight does not grow with their rows."""


def check_aggregation(how: str, max_length: int) -> None:
    """Refuse an unknown aggregation, or a `max_length` that is missing.

    Raises:
        ConfigError: names the choices.
    """
    if how not in get_args(Aggregation):
        raise ConfigError(f"aggregation: {how!r} is unknown; write one of {', '.join(get_args(Aggregation))}")
    if how == "max_length" and max_length < 1:
        raise ConfigError(
            f"aggregation 'max_length' divides by max_length, got {max_length}; write the largest response length"
        )


def aggregate(
    values: Float[Tensor, "rows length"],
    mask: Bool[Tensor, "rows length"],
    how: Aggregation = "token_mean",
    *,
    max_length: int = 0,
    count_empty_rows: bool = True,
    prompt_tokens: Float[Tensor, " rows"] | None = None,
    episode_share: Float[Tensor, " rows"] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Sum and weight of per-token values; the weight depends on the mask alone.

    Args:
        values: one number per token; what the mask hides may be anything.
        mask: True where a token counts.
        how: see `Aggregation`.
        max_length: the divisor of `max_length`, in tokens.
        count_empty_rows: whether a response without a counted token is part of the mean over responses, as a
            zero. True in TRL, False in OpenRLHF and verl. Irrelevant to `token_mean` and `prompt_mean`.
        prompt_tokens: for `prompt_mean`: the counted tokens of all responses to the row's prompt, in the global
            batch.
        episode_share: the column `EPISODE_SHARE`; None where every row is a response of its own.

    >>> values, mask = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    >>> [float(t / w) for t, w in (aggregate(values, mask), aggregate(values, mask, "seq_mean_token_mean"))]
    [3.0, 3.5]
    """
    check_aggregation(how, max_length)
    if how == "token_mean":
        return masked_sum(values, mask), mask.sum().to(values.dtype)
    if how == "prompt_mean":
        if prompt_tokens is None:
            raise ConfigError(
                "aggregation 'prompt_mean' needs the column 'prompt_tokens', which recipes add to the batches of "
                "policy losses; write another aggregation elsewhere"
            )
        share = 1 / prompt_tokens.to(values.dtype).clamp(min=1)
        return (masked_sum(values, mask, dim=1) * share).sum(), (mask.sum(dim=1) * share).sum()
    per_row = masked_mean(values, mask, dim=1) if how == "seq_mean_token_mean" else masked_sum(values, mask, dim=1)
    if how == "max_length":
        per_row = per_row / max_length
    if episode_share is None:
        return per_row.sum(), row_count(mask, count_empty_rows=count_empty_rows).to(values.dtype)
    share = episode_share.to(values.dtype)
    counted = share if count_empty_rows else share * mask.any(dim=1)
    # A mean over an episode's tokens is that of its rows' means by their shares; a sum needs none.
    total = (per_row * share).sum() if how == "seq_mean_token_mean" else per_row.sum()
    return total, counted.sum()


def row_count(mask: Bool[Tensor, "rows length"], *, count_empty_rows: bool = True) -> Float[Tensor, ""]:
    """Responses that a mean over responses divides by."""
    rows = torch.ones_like(mask[:, 0]) if count_empty_rows else mask.any(dim=1)
    return rows.sum().float()


def add_aux_loss(terms: LossTerms, outputs: ModelOutputs, coef: float) -> LossTerms:
    """Add coef * aux_loss * weight, so that the step's mean gains coef times the mean router loss.

    Raises:
        ConfigError: `coef` is not 0 and the engine returned no aux_loss.
    """
    if not coef:
        return terms
    if outputs.aux_loss is None:
        raise ConfigError("aux_loss_coef is set but the model returned no aux_loss; set it to 0 for a dense model")
    value, weight = float(outputs.aux_loss.detach()), float(terms.weight)
    return LossTerms(
        total=terms.total + coef * outputs.aux_loss * terms.weight,
        weight=terms.weight,
        metrics={**terms.metrics, "aux_loss": Mean(total=value * weight, weight=weight)},
    )
