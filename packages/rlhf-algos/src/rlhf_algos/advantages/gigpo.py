"""Advantages of turns against other turns that began in the same state of the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from rlhf_core import Batch, ConfigError
from torch import Tensor

from rlhf_algos.advantages.groups import GRPOAdvantagesConfig, grpo_advantages
from rlhf_algos.advantages.returns import spread_scores, turn_ends, turn_starts
from rlhf_algos.advantages.reward_shaping import placed_rewards
from rlhf_algos.choices import check_choices


@dataclass(frozen=True, kw_only=True, slots=True)
class GiGPOAdvantagesConfig(GRPOAdvantagesConfig):
    """Configuration of `gigpo_advantages`."""

    scale: Literal["group", "none"] = "none"  # type: ignore[assignment]
    """Divide by the standard deviation of the group, of episodes and of turns, or not."""
    gamma: float = 0.95
    """Discount per turn."""
    turn_weight: float = 1.0
    """Weight of the advantage of a turn beside that of the episode (omega)."""

    def __post_init__(self) -> None:
        GRPOAdvantagesConfig.__post_init__(self)
        check_choices("gigpo", self, scale=Literal["group", "none"])
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gigpo: gamma must be in [0, 1], got {self.gamma}")

    @property
    def by_steps(self) -> bool:
        """Never: the estimator looks at the turns itself."""
        return False


def gigpo_advantages(
    scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch, config: GiGPOAdvantagesConfig
) -> Float[Tensor, "rows length"]:
    """Advantage of the episode plus omega times that of the turn (GiGPO, Feng et al. 2025, 2505.10978, eq. 3-8).

    The episode's is that of `grpo_advantages`. A turn's is the same of its discounted return, sum_k gamma^k (reward
    of the k-th turn from it on), among the turns of the group that began in the same state, in whatever row and at
    whatever time; a turn alone in its state has 0.

    Columns: `rewards` [rows, length], without which the score is the last turn's; `turn_states` [rows, length], a
    number for the state in which a turn begins, read at its first token. Without it the state is what the
    environment said last: the tokens between the turn and the one before it; the first turns share the prompt.
    """
    mask = batch.response_mask
    rewards = placed_rewards(scores, batch)
    episode = spread_scores(grpo_advantages(scores, group_ids, batch, config), mask)
    starts, turn = _turns(batch)
    rows = starts[:, 0]
    earned = torch.zeros(len(starts), dtype=scores.dtype, device=scores.device)
    earned = earned.index_add(0, turn[mask], rewards[mask])
    returns = _discounted(earned, rows, config.gamma)
    states = _state_groups(batch, starts, group_ids)
    plain = GRPOAdvantagesConfig(scale=config.scale, eps=config.eps, unbiased=config.unbiased)
    judged = grpo_advantages(returns, states, batch, plain)
    judged = torch.where(mask, judged[turn] if len(judged) else 0.0, 0.0)
    return (episode + config.turn_weight * judged).masked_fill(~mask, 0)


def _turns(batch: Batch) -> tuple[Int[Tensor, "turns 2"], Int[Tensor, "rows length"]]:
    """Row and first position of every turn in order, and the number of the turn that each token belongs to."""
    mask = batch.response_mask
    starts = turn_starts(mask)
    number = starts.flatten().long().cumsum(0).view(mask.shape) - 1
    return starts.nonzero(), number.clamp(min=0)


def _discounted(earned: Tensor, rows: Tensor, gamma: float) -> Tensor:
    """Discounted returns over the turns of each row, which follow each other in order."""
    returns, following = torch.zeros_like(earned), earned.new_zeros(())
    for turn in reversed(range(len(earned))):
        same = turn + 1 < len(earned) and rows[turn + 1] == rows[turn]
        following = earned[turn] + (gamma * following if same else 0.0)
        returns[turn] = following
    return returns


def _state_groups(batch: Batch, starts: Tensor, group_ids: Tensor) -> Int[Tensor, " turns"]:
    """A number for each turn, equal for turns of one group that began in the same state."""
    known: dict[tuple[object, ...], int] = {}
    ends = turn_ends(batch.response_mask)
    found = []
    for row, start in starts.tolist():
        if "turn_states" in batch:
            state: tuple[object, ...] = (batch["turn_states"][row, start].item(),)
        else:
            earlier = ends[row, :start].nonzero().flatten()
            after = int(earlier[-1]) + 1 if len(earlier) else start
            state = tuple(batch.token_ids[row, after:start].tolist())
        found.append(known.setdefault((int(group_ids[row]), *state), len(known)))
    return torch.tensor(found, dtype=torch.long, device=group_ids.device)
