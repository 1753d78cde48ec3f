"""Estimators of other objectives than the mean score of a response: pass@k, the best of a group, likelihood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from rlhf_core import Batch, ConfigError
from torch import Tensor

from rlhf_algos.advantages.groups import GroupConfig, group_statistics, group_sum
from rlhf_algos.choices import check_choices


@dataclass(frozen=True, kw_only=True, slots=True)
class GPGAdvantagesConfig(GroupConfig):
    """Configuration of `gpg_advantages`."""


def gpg_advantages(
    scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch, config: GPGAdvantagesConfig
) -> Float[Tensor, " rows"]:
    """alpha (score - group mean), alpha = rows / rows of groups whose scores differ (GPG, Chu et al. 2025, eq. 7).

    Groups whose scores are all equal have no gradient and would dilute the mean over the batch; alpha makes up for
    them. verl takes rows / rows with a score other than 0 for alpha.
    """
    groups = group_statistics(scores, group_ids)
    alone = groups.count == 1
    centred = torch.where(alone, config.lone(scores), scores - groups.mean)
    useful = (groups.squares > 1e-12).sum() + (alone & (centred != 0)).sum()
    return centred * len(scores) / useful.clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxRLAdvantagesConfig(GroupConfig):
    """Configuration of `max_rl_advantages`."""


def max_rl_advantages(
    scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch, config: MaxRLAdvantagesConfig
) -> Float[Tensor, " rows"]:
    """(score - group mean) / group mean (MaxRL, 2602.02710).

    For scores of 0 and 1 this is the gradient of the likelihood of a right answer, expanded to as many terms as
    there are responses: a prompt that is solved rarely weighs 1 / its pass rate. Scores must not be negative; a
    group whose mean is 0 has nothing to learn from.
    """
    groups = group_statistics(scores, group_ids)
    alone, silent = groups.count == 1, groups.mean <= 0
    advantages = (scores - groups.mean) / torch.where(silent, 1.0, groups.mean)
    return torch.where(alone, config.lone(scores), advantages.masked_fill(silent, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassAtKAdvantagesConfig(GroupConfig):
    """Configuration of `pass_at_k_advantages`."""

    k: int = 4
    """Attempts of which one must pass; 1 is GRPO with the deviation over n."""
    pass_score: float = 0.5
    """A response passes with a score above this."""
    eps: float = 1e-6
    """Added to the deviation."""

    def __post_init__(self) -> None:
        GroupConfig.__post_init__(self)
        if self.k < 1:
            raise ConfigError(f"pass_at_k: k must be at least 1, got {self.k}")

    @property
    def min_samples_per_prompt(self) -> int:
        """One more than k: a group of k has a single subset, which there is nothing to compare with."""
        return self.k + 1

    @property
    def by_steps(self) -> bool:
        """Never: a response passes or fails as a whole."""
        return False


def pass_at_k_advantages(
    scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch, config: PassAtKAdvantagesConfig
) -> Float[Tensor, " rows"]:
    """The mean over all subsets of k responses of the advantage of pass@k (Chen et al. 2025, 2508.10751).

    With n responses of which m fail, P = C(m, k) / C(n, k) the share of subsets without a pass and s = sqrt(P (1 -
    P)): a response that passes has P / s, one that fails (P - C(m - 1, k - 1) / C(n - 1, k - 1)) / s. A group of
    k responses or fewer, and one whose responses all pass or all fail, has nothing to learn from.
    """
    passed = (scores > config.pass_score).to(scores.dtype)
    count = group_sum(torch.ones_like(scores), group_ids)
    failed = count - group_sum(passed, group_ids)
    none_passes = _subsets(failed, config.k) / _subsets(count, config.k).clamp(min=1)
    none_beside = _subsets(failed - 1, config.k - 1) / _subsets(count - 1, config.k - 1).clamp(min=1)
    deviation = (none_passes * (1 - none_passes)).sqrt()
    advantages = (none_passes - none_beside * (1 - passed)) / (deviation + config.eps)
    silent = (count <= config.k) | (failed == 0) | (failed == count)
    return advantages.masked_fill(silent, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BestOfGroupAdvantagesConfig(GroupConfig):
    """Configuration of `best_of_group_advantages`."""

    scale: Literal["group", "none"] = "group"
    """Divide by the standard deviation of the group's scores (verl's `grpo_passk`), or not."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        GroupConfig.__post_init__(self)
        check_choices("best_of_group", self, scale=Literal["group", "none"])

    @property
    def by_steps(self) -> bool:
        """Never: the best response is so as a whole."""
        return False


def best_of_group_advantages(
    scores: Float[Tensor, " rows"],
    group_ids: Int[Tensor, " rows"],
    batch: Batch,
    config: BestOfGroupAdvantagesConfig,
) -> Float[Tensor, " rows"]:
    """What a response adds to the best score of its group: best - best of the others (2503.19595).

    It is 0 for all but the best one, and for that one too if another is as good (Tang et al. 2025; verl's
    `grpo_passk`).
    """
    same = group_ids.unsqueeze(0) == group_ids.unsqueeze(1)
    others = same & ~torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    best_other = scores.expand(len(scores), -1).masked_fill(~others, -torch.inf).max(dim=1).values
    groups = group_statistics(scores, group_ids)
    alone = groups.count == 1
    gain = torch.where(alone, config.lone(scores), (scores - best_other).clamp(min=0))
    if config.scale == "none":
        return gain
    return gain / (torch.where(alone, 1.0, groups.std(unbiased=True)) + config.eps)


def _subsets(count: Float[Tensor, " rows"], k: int) -> Float[Tensor, " rows"]:
    """C(count, k); 0 where count is less than k."""
    count = count.round()
    result = torch.ones_like(count)
    for step in range(k):
        result = result * (count - step).clamp(min=0) / (step + 1)
    return result
