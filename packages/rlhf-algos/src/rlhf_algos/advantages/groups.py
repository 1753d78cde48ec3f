"""Advantages of whole responses against the other responses to the same prompt: one number per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from rlhf_core import ConfigError
from torch import Tensor

AdvantageScale = Literal["group", "batch", "none"]
"""What a centred score is divided by: the standard deviation of its group (GRPO), of the whole batch (TRL's
`scale_rewards="batch"`, Lite PPO), or nothing (Dr. GRPO)."""

LoneAdvantage = Literal["zero", "score"]
"""Advantage of a response without siblings: 0 (TRL) or its score, as if the baseline were 0 (verl)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStatistics:
    """Statistics of the scores of each row's group, one entry per row."""

    count: Float[Tensor, " rows"]
    """Responses in the row's group."""
    mean: Float[Tensor, " rows"]
    squares: Float[Tensor, " rows"]
    """Sum of squared deviations from the mean."""

    def std(self, *, unbiased: bool) -> Float[Tensor, " rows"]:
        """Standard deviation, 0 for a group of one."""
        return (self.squares / (self.count - int(unbiased)).clamp(min=1)).sqrt()


def group_statistics(scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"]) -> GroupStatistics:
    """Count, mean and squared deviations per group; groups may have any size and order."""
    inverse = torch.unique(group_ids, return_inverse=True)[1]

    def total(values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, inverse, values)[inverse]

    count = total(torch.ones_like(scores))
    mean = total(scores) / count
    return GroupStatistics(count=count, mean=mean, squares=total((scores - mean).square()))


def grpo_advantages(
    scores: Float[Tensor, " rows"],
    group_ids: Int[Tensor, " rows"],
    *,
    scale: AdvantageScale = "group",
    eps: float = 1e-6,
    unbiased: bool = True,
    singleton: LoneAdvantage = "zero",
) -> Float[Tensor, " rows"]:
    """(score - group mean) / (std + eps) (DeepSeekMath, Shao et al. 2024, section 4.1.2).

    Args:
        scores: one per response.
        group_ids: equal for responses to the same prompt.
        scale: see `AdvantageScale`; `none` gives Dr. GRPO (Liu et al. 2025).
        eps: added to the standard deviation: 1e-4 in TRL, 1e-6 in verl, 1e-9 in OpenRLHF.
        unbiased: divide the variance by n - 1 (TRL, verl and OpenRLHF) and not by n.
        singleton: see `LoneAdvantage`.

    A group whose scores are all equal gets zeros.

    >>> grpo_advantages(torch.tensor([1.0, 3.0, 7.0]), torch.tensor([0, 0, 1]), scale="none")
    tensor([-1.,  1.,  0.])
    """
    if scale not in get_args(AdvantageScale):
        raise ConfigError(
            f"advantages: scale {scale!r} is unknown; write one of {', '.join(get_args(AdvantageScale))}"
        )
    groups = group_statistics(scores, group_ids)
    alone = groups.count == 1
    if scale == "group":
        # A lone response has no deviation of its own: its score stays as it is (times one, as in verl).
        divisor = torch.where(alone, 1.0, groups.std(unbiased=unbiased)) + eps
    elif scale == "batch":
        squares = (scores - scores.mean()).square().sum()
        divisor = (squares / max(len(scores) - int(unbiased), 1)).sqrt() + eps
    else:
        divisor = torch.ones_like(scores)
    return _centred(scores, groups, singleton) / divisor


def rloo_advantages(
    scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], *, singleton: LoneAdvantage = "zero"
) -> Float[Tensor, " rows"]:
    """Score minus the mean of the *other* scores of its group (RLOO, Kool et al. 2019; Ahmadian et al. 2024).

    >>> rloo_advantages(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 0]))
    tensor([-3.0000, -1.5000,  4.5000])
    """
    groups = group_statistics(scores, group_ids)
    return _centred(scores, groups, singleton) * groups.count / (groups.count - 1).clamp(min=1)


def opo_advantages(
    scores: Float[Tensor, " rows"],
    group_ids: Int[Tensor, " rows"],
    lengths: Float[Tensor, " rows"],
    *,
    singleton: LoneAdvantage = "zero",
) -> Float[Tensor, " rows"]:
    """Score minus the length-weighted mean of its group, the variance-optimal baseline (OPO, Hao et al. 2025).

    Args:
        scores: one per response.
        group_ids: equal for responses to the same prompt.
        lengths: sampled tokens per response.
        singleton: see `LoneAdvantage`.
    """
    lengths = lengths.to(scores.dtype)
    groups, weights = group_statistics(scores * lengths, group_ids), group_statistics(lengths, group_ids)
    baseline = groups.mean / weights.mean.clamp(min=torch.finfo(scores.dtype).tiny)
    alone = groups.count == 1
    return torch.where(alone, scores if singleton == "score" else 0.0, scores - baseline)


def remax_advantages(
    scores: Float[Tensor, " rows"], greedy_scores: Float[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Score minus the score of the greedy response to the same prompt (ReMax, Li et al. 2023)."""
    return scores - greedy_scores


def _centred(scores: Tensor, groups: GroupStatistics, singleton: LoneAdvantage) -> Tensor:
    if singleton not in get_args(LoneAdvantage):
        raise ConfigError(
            f"advantages: singleton {singleton!r} is unknown; write one of {', '.join(get_args(LoneAdvantage))}"
        )
    alone = scores if singleton == "score" else torch.zeros_like(scores)
    return torch.where(groups.count == 1, alone, scores - groups.mean)
