"""Advantages of the steps of a response, where the column `rewards` says which tokens earned what.

A step ends with a turn (a run of sampled tokens) and at every token that was rewarded.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from rlhf_core import Batch
from torch import Tensor

from rlhf_algos.advantages.estimator import Advantage
from rlhf_algos.advantages.groups import group_sum
from rlhf_algos.advantages.returns import turn_ends
from rlhf_algos.advantages.reward_shaping import placed_rewards


def step_index(
    rewards: Float[Tensor, "rows length"], response_mask: Bool[Tensor, "rows length"]
) -> Int[Tensor, "rows length"]:
    """The number of each token's step: how many steps of its row ended before it.

    >>> step_index(torch.tensor([[0.0, 0.5, 0.0, 0.0, 1.0]]), torch.tensor([[False, True, True, True, True]]))
    tensor([[0, 0, 1, 1, 1]])
    """
    ends = turn_ends(response_mask) | (response_mask & (rewards != 0))
    return ends.long().cumsum(dim=1) - ends.long()


def step_advantages(
    advantage: Advantage, scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch
) -> Float[Tensor, " rows"] | Float[Tensor, "rows length"]:
    """The estimator's advantages, step by step where rewards fell before the end of a response.

    Step k has the advantage of the return from it on, among the rows of the group that have a step k: a step is
    judged by what came of it, not by what was earned before. Without the column `rewards` [rows, length], and in
    groups that were rewarded in their last steps alone, that is one advantage per response. An estimator that is
    not for steps (`AdvantageConfig.by_steps`), or gives an advantage to each token, is called once.
    """
    whole = advantage(scores, group_ids, batch)
    if "rewards" not in batch or not advantage.says("by_steps") or whole.dim() > 1:
        return whole
    mask, rewards = batch.response_mask, placed_rewards(scores, batch)
    index = step_index(rewards, mask)
    last = index.masked_fill(~mask, 0).max(dim=1).values
    early = ((rewards != 0) & (index < last.unsqueeze(1))).any(dim=1)
    stepwise = group_sum(early.to(scores.dtype), group_ids) > 0
    if not stepwise.any():
        return whole
    result = whole.unsqueeze(1).expand(mask.shape).masked_fill(~mask, 0)
    for step in range(1, int(last.max()) + 1):
        rows = (stepwise & (last >= step)).nonzero().flatten()
        returns = rewards.masked_fill(index < step, 0).sum(dim=1)[rows]
        values = advantage(returns, group_ids[rows], batch.select(rows.tolist()))
        update = torch.where((index[rows] == step) & mask[rows], values.unsqueeze(1), result[rows])
        result = result.index_copy(0, rows, update)
    return result
