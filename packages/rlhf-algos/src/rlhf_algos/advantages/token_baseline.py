"""A baseline for each token: the one that makes the gradient's variance least, as far as log-probs tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from rlhf_core import Batch
from torch import Tensor

from rlhf_algos.advantages.groups import GroupConfig, LoneAdvantage
from rlhf_algos.advantages.reward_shaping import placed_rewards
from rlhf_algos.choices import check_choices


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimalTokenAdvantagesConfig(GroupConfig):
    """Configuration of `optimal_token_advantages`."""

    tail: LoneAdvantage = "zero"
    """Advantage of tokens so late that no sibling has one: 0, or their return (verl's `handle_zero_tail`)."""
    eps: float = 1e-8
    """Added to the sum of the weights."""

    def __post_init__(self) -> None:
        GroupConfig.__post_init__(self)
        check_choices("optimal_token", self, tail=LoneAdvantage)

    @property
    def old_outputs(self) -> tuple[str, ...]:
        """The probability of drawing the same token twice."""
        return ("log_collision",)

    @property
    def by_steps(self) -> bool:
        """Never: the estimator reads `rewards` itself."""
        return False


def optimal_token_advantages(
    scores: Float[Tensor, " rows"],
    group_ids: Int[Tensor, " rows"],
    batch: Batch,
    config: OptimalTokenAdvantagesConfig,
) -> Float[Tensor, "rows length"]:
    """Return from a token on minus the group's weighted mean at the same place (verl's `optimal_token_baseline`).

    A_t = G_t - B_t for the t-th sampled token, B_t = sum_i G_i,t W_i,t / sum_i W_i,t over the responses of the
    group that are so long. W_t = sum_{j <= t} (1 - 2 p_j + sum_v p_j(v)^2) stands for the squared norm of the
    gradient of the log-prob of the first t tokens: exactly so for the logits of one layer. A response whose
    tokens were unlikely tells more of the baseline that is best against its noise.

    Columns: `old_log_probs` and `old_log_collision` [rows, length]; `rewards` [rows, length], optional.
    """
    mask = batch.response_mask
    rewards = placed_rewards(scores, batch)
    returns = rewards.flip(1).cumsum(1).flip(1)
    probability = batch["old_log_probs"].to(scores.dtype).masked_fill(~mask, 0).exp()
    collision = batch["old_log_collision"].to(scores.dtype).masked_fill(~mask, 0).exp()
    weights = (1 - 2 * probability + collision).masked_fill(~mask, 0).cumsum(dim=1)
    place = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    group = torch.unique(group_ids, return_inverse=True)[1].unsqueeze(1).expand(mask.shape)
    cell = group * mask.shape[1] + place

    def total(values: Tensor) -> Tensor:
        cells = values.new_zeros((int(group.max()) + 1) * mask.shape[1] if len(group) else 0)
        return cells.index_add(0, cell[mask], values[mask])[cell]

    baseline = total(returns * weights) / (total(weights) + config.eps)
    rows = torch.bincount(group[:, 0], minlength=1)[group[:, 0]].unsqueeze(1)
    alone = torch.where(rows == 1, config.singleton == "score", config.tail == "score")
    single = total(torch.ones_like(returns)) == 1
    own = torch.where(alone, returns, 0.0)
    return torch.where(single, own, returns - baseline).masked_fill(~mask, 0)
