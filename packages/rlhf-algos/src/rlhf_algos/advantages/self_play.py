"""Baselines for games that a policy plays against itself, where the responses of a group have different roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from rlhf_core import ConfigError
from torch import Tensor


class RoleBaselines:
    """Role-conditioned advantage estimation (RAE; SPIRAL, Liu et al. 2025, 2506.24119).

    Each role has a moving average of its own scores, b <- decay b + (1 - decay) score, and a response's advantage
    is its score minus the average of its role *before* that score went in. A mean over the players of a zero-sum
    game would be 0 whatever they do. The averages last over steps, so that this is no estimator of a recipe: a
    loop of one's own calls it and saves its state; the recipe's estimator is then `reinforce`.

    >>> baselines = RoleBaselines(decay=0.5)
    >>> baselines.advantages(torch.tensor([1.0, 0.0, 1.0]), ["first", "second", "first"])
    tensor([1.0000, 0.0000, 0.5000])
    """

    def __init__(self, *, decay: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"role baselines: decay must be in [0, 1), got {decay}")
        self.decay = decay
        self.values: dict[str, float] = {}

    def advantages(self, scores: Float[Tensor, " rows"], roles: Sequence[str]) -> Float[Tensor, " rows"]:
        """Score minus baseline of each row in order; the baselines move along.

        Args:
            scores: one per response.
            roles: the role that each response played, for instance `game/first player`.
        """
        result = []
        for score, role in zip(scores.tolist(), roles, strict=True):
            baseline = self.values.get(role, 0.0)
            result.append(score - baseline)
            self.values[role] = self.decay * baseline + (1 - self.decay) * score
        return torch.tensor(result, dtype=scores.dtype, device=scores.device)

    def state_dict(self) -> dict[str, float]:
        """The baselines by role: what a checkpoint must hold."""
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`."""
        self.values = {role: float(value) for role, value in state.items()}
