"""Rows and losses that stand for those of a run: what a planned pass goes through."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rlhf_algos import LearnsFromPairs, Recipe, make_recipe
from rlhf_core import Batch, Loss, Role

_COLUMNS = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "returns", "old_values")
_OUTPUTS: dict[Role, tuple[str, ...]] = {
    "policy": ("log_probs",),
    "reference": ("log_probs",),
    "critic": ("values",),
    "reward": ("scores",),
}


_MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShape:
    """The longest rows of a run: tokens of the prompt, and of the response."""

    prompt: int
    response: int

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.response

    def batch(self, tokens: int, *, one_row: bool) -> Batch:
        """A micro-batch of so many tokens, at least one row.

        Args:
            tokens: of the micro-batch.
            one_row: all tokens in a single row, its response as long as those of all rows. A kernel that runs all
                segments of a packed row at once needs as much memory for one as for many.
        """
        rows = max(1, tokens // self.length)
        # Many short rows stand in fewer, longer ones: a pass over fake tensors takes its time for every row.
        times = -(-rows // (1 if one_row else _MOST_ROWS))
        return planned_rows(rows=rows // times, prompt=self.prompt * times, response=self.response * times)


def planned_rows(*, rows: int, prompt: int, response: int, vocabulary: int = 64) -> Batch:
    """Rows of equal lengths that share no prompt, with the columns that losses read."""
    length = prompt + response
    random = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, length, dtype=torch.bool)
    responses = mask.clone()
    responses[:, : max(1, prompt)] = False
    ids = torch.randint(vocabulary, (rows, length), generator=random)
    noise = torch.randn(rows, length, generator=random) / 100
    return Batch(
        token_ids=ids,
        attention_mask=mask,
        response_mask=responses,
        columns=dict.fromkeys(_COLUMNS, noise),
    )


def planned_loss(role: Role, recipe: Recipe | None = None) -> Loss:
    """The loss that trains a role under the run's algorithm; that of PPO if none is given.

    Raises:
        ValueError: the algorithm trains no such role.
    """
    recipe = recipe or make_recipe("ppo", {})
    if role == "policy" and isinstance(recipe, LearnsFromPairs):
        recipe = make_recipe("grpo", {})  # a preference loss asks the model for the same, and needs rows in pairs
    loss = recipe.policy_loss() if role == "policy" else recipe.value_loss()
    if loss is None:
        raise ValueError(f"the algorithm has no loss for the {role}")
    return loss


def scored_outputs(role: Role) -> tuple[str, ...]:
    """What a role is asked for without gradients."""
    return _OUTPUTS[role]
