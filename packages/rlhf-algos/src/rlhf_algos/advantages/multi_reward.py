"""Advantages of responses that are scored for several things at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from rlhf_core import Batch, ConfigError
from torch import Tensor

from rlhf_algos.advantages.groups import GroupConfig, group_statistics, standard_deviation


@dataclass(frozen=True, kw_only=True, slots=True)
class GDPOAdvantagesConfig(GroupConfig):
    """Configuration of `gdpo_advantages`."""

    parts: Mapping[str, float] = field(default_factory=dict)
    """Name of a part of the score to its weight; needs at least one."""
    eps: float = 1e-4
    """Added to each standard deviation."""

    def __post_init__(self) -> None:
        GroupConfig.__post_init__(self)
        if not self.parts:
            raise ConfigError(
                "gdpo: parts is empty; write the names of the score's parts with their weights, for instance "
                "advantage_options: {parts: {correct: 1.0, format: 0.5}}"
            )

    @property
    def score_parts(self) -> tuple[str, ...]:
        """The names in `parts`."""
        return tuple(self.parts)

    @property
    def by_steps(self) -> bool:
        """Never: the parts of a score have no places."""
        return False


def gdpo_advantages(
    scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch, config: GDPOAdvantagesConfig
) -> Float[Tensor, " rows"]:
    """Each part normalised in its group by itself, their weighted sum normalised over the batch (GDPO, 2601.05242).

    A = (x - mean x) / (std x + eps) over the batch with x = sum_p weight_p (part_p - group mean) / (group std
    + eps); TRL's `multi_objective_aggregation="normalize_then_sum"`. Parts of different scales and rarities
    then keep their differences, which the deviation of a plain sum would wash out. Columns: `score/<part>`
    [rows]; the sum itself is not read. Deviations are over n - 1."""
    total = torch.zeros_like(scores)
    for name, weight in config.parts.items():
        part = batch[f"score/{name}"].to(scores.dtype)
        groups = group_statistics(part, group_ids)
        alone = groups.count == 1
        centred = torch.where(alone, config.lone(part), part - groups.mean)
        total = total + weight * centred / (groups.std(unbiased=True) + torch.where(alone, 1.0, config.eps))
    return (total - total.mean()) / (standard_deviation(total, unbiased=True) + config.eps)
