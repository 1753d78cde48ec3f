"""Advantages of whole responses against the other responses to the same prompt: one number per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from rlhf_core import Batch
from torch import Tensor

from rlhf_algos.advantages.estimator import AdvantageConfig
from rlhf_algos.choices import check_choices

AdvantageScale = Literal["group", "batch", "advantages", "none"]
"""What a centred score is divided by: the standard deviation of its group's scores (GRPO), of all scores of
the batch (TRL's `scale_rewards="batch"`, Lite PPO), of all centred scores of the batch (ScaleRL), or nothing
(Dr. GRPO)."""

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
    count = group_sum(torch.ones_like(scores), group_ids)
    mean = group_sum(scores, group_ids) / count
    return GroupStatistics(count=count, mean=mean, squares=group_sum((scores - mean).square(), group_ids))


def group_sum(values: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """The sum over each row's group."""
    inverse = torch.unique(group_ids, return_inverse=True)[1]
    return torch.zeros_like(values).index_add(0, inverse, values)[inverse]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig(AdvantageConfig):
    """What estimators with a baseline from the other responses to the prompt share."""

    singleton: LoneAdvantage = "zero"
    """Advantage of a response without siblings; see `LoneAdvantage`."""

    def __post_init__(self) -> None:
        check_choices("advantage", self, singleton=LoneAdvantage)

    @property
    def min_samples_per_prompt(self) -> int:
        """Two, unless a lone response keeps its score."""
        return 1 if self.singleton == "score" else 2

    def lone(self, scores: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """The advantages that the responses would have if each were alone."""
        return scores if self.singleton == "score" else torch.zeros_like(scores)


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOAdvantagesConfig(GroupConfig):
    """Configuration of `grpo_advantages`."""

    scale: AdvantageScale = "group"
    """See `AdvantageScale`; `none` gives Dr. GRPO (Liu et al. 2025)."""
    eps: float = 1e-6
    """Added to the standard deviation: 1e-4 in TRL, 1e-6 in verl, 1e-9 in OpenRLHF."""
    unbiased: bool = True
    """Divide the variance by n - 1 (TRL, verl and OpenRLHF) and not by n."""

    def __post_init__(self) -> None:
        GroupConfig.__post_init__(self)
        check_choices("advantage", self, scale=AdvantageScale)

    @property
    def by_groups(self) -> bool:
        """True unless the scale is of the batch."""
        return self.scale in ("group", "none")


def grpo_advantages(
    scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch, config: GRPOAdvantagesConfig
) -> Float[Tensor, " rows"]:
    """(score - group mean) / (std + eps) (DeepSeekMath, Shao et al. 2024, section 4.1.2).

    A group whose scores are all equal gets zeros.
    """
    groups = group_statistics(scores, group_ids)
    alone = groups.count == 1
    if config.scale == "group":
        # A lone response has no deviation of its own: its score stays as it is (times one, as in verl).
        divisor = torch.where(alone, 1.0, groups.std(unbiased=config.unbiased)) + config.eps
    elif config.scale == "none":
        divisor = torch.ones_like(scores)
    else:
        spread = scores if config.scale == "batch" else scores - groups.mean
        divisor = standard_deviation(spread, unbiased=config.unbiased) + config.eps
    return torch.where(alone, config.lone(scores), scores - groups.mean) / divisor


def standard_deviation(values: Float[Tensor, " rows"], *, unbiased: bool) -> Float[Tensor, ""]:
    """Over all rows; 0 for a single one."""
    squares = (values - values.mean()).square().sum()
    return (squares / max(len(values) - int(unbiased), 1)).sqrt()


@dataclass(frozen=True, kw_only=True, slots=True)
class RLOOAdvantagesConfig(GroupConfig):
    """Configuration of `rloo_advantages`."""

    @property
    def by_groups(self) -> bool:
        """Always."""
        return True


def rloo_advantages(
    scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch, config: RLOOAdvantagesConfig
) -> Float[Tensor, " rows"]:
    """Score minus the mean of the *other* scores of its group (RLOO, Kool et al. 2019; Ahmadian et al. 2024)."""
    groups = group_statistics(scores, group_ids)
    others = (scores - groups.mean) * groups.count / (groups.count - 1).clamp(min=1)
    return torch.where(groups.count == 1, config.lone(scores), others)


@dataclass(frozen=True, kw_only=True, slots=True)
class OPOAdvantagesConfig(GroupConfig):
    """Configuration of `opo_advantages`."""

    @property
    def by_groups(self) -> bool:
        """Always."""
        return True


def opo_advantages(
    scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch, config: OPOAdvantagesConfig
) -> Float[Tensor, " rows"]:
    """Score minus the length-weighted mean of its group, the variance-optimal baseline (OPO, Hao et al. 2025).

    The length is the number of sampled tokens.
    """
    lengths = batch.response_mask.count_nonzero(dim=1).to(scores.dtype)
    weight = group_sum(lengths, group_ids).clamp(min=torch.finfo(scores.dtype).tiny)
    baseline = group_sum(scores * lengths, group_ids) / weight
    alone = group_sum(torch.ones_like(scores), group_ids) == 1
    return torch.where(alone, config.lone(scores), scores - baseline)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReMaxAdvantagesConfig(AdvantageConfig):
    """Configuration of `remax_advantages`."""

    @property
    def needs_greedy_scores(self) -> bool:
        """Always."""
        return True

    @property
    def by_groups(self) -> bool:
        """Always."""
        return True


def remax_advantages(
    scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch, config: ReMaxAdvantagesConfig
) -> Float[Tensor, " rows"]:
    """Score minus the score of the greedy response to the same prompt (ReMax, Li et al. 2023).

    Column: `greedy_scores` [rows].
    """
    return scores - batch["greedy_scores"].to(scores.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforceAdvantagesConfig(AdvantageConfig):
    """Configuration of `reinforce_advantages`."""

    baseline: float = 0.0
    """Constant that is subtracted; 0.5 where scores are probabilities of being preferred (Nash-MD)."""

    @property
    def by_groups(self) -> bool:
        """Always."""
        return True


def reinforce_advantages(
    scores: Float[Tensor, " rows"],
    group_ids: Int[Tensor, " rows"],
    batch: Batch,
    config: ReinforceAdvantagesConfig,
) -> Float[Tensor, " rows"]:
    """The score itself, minus a constant: no baseline of the batch's (REINFORCE, Williams 1992)."""
    return scores - config.baseline
