"""Online DPO: the best against the worst of the policy's own samples of a prompt, trained by a preference loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from rlhf_core import Batch, ConfigError, Loss, Mean, config_from, masked_sum, mean_of
from torch import Tensor

from rlhf_algos.advantages.reward_shaping import RewardShaping, shape_scores
from rlhf_algos.kl import FixedKL, KLController
from rlhf_algos.losses.offline.pairwise import PairLoss
from rlhf_algos.losses.offline.preference import DPOConfig, dpo
from rlhf_algos.recipes.grpo import group_metrics
from rlhf_algos.recipes.recipe import Metrics

PAIR_SIDE = "pair_side"
"""Column [rows] that a recipe which `LearnsFromPairs` adds: 1 for the chosen row of a group, 2 for the rejected
one, 0 for rows that are in no pair. A group has a row of each or none of both."""


@runtime_checkable
class LearnsFromPairs(Protocol):
    """A recipe whose `policy_loss` takes rows that alternate chosen, rejected (`rows_per_unit=2`), and whose
    `prepare` adds the column `PAIR_SIDE`. The loop trains on these rows alone and keeps both of a pair together."""

    @property
    def learns_from_pairs(self) -> bool:
        """True if it does."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineDPO:
    """DPO, IPO or a relative on pairs of the policy's own samples (Guo et al. 2024, 2402.04792).

    Of the samples of a prompt the one with the highest score is chosen and the one with the lowest rejected, the
    first of equal ones. Prompts whose samples score alike teach nothing and are left out. The loss is `dpo`, with
    the reference's log-probs.
    """

    loss: PairLoss = "sigmoid"
    """See `PairLoss`: `sigmoid` (DPO), `ipo`, `hinge`, ..."""
    beta: float = 0.1
    """Strength of the pull towards the reference; the tau of IPO."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `DPOConfig`: label_smoothing, length_normalized, f_divergence, weighted, sft_coef, ..."""
    min_score_gap: float = 0.0
    """Prompts whose best and worst scores differ by no more than this count as ties."""
    shaping: RewardShaping = field(default_factory=RewardShaping)
    """What happens to the scores first: `truncation_penalty` is TRL's `missing_eos_penalty`."""

    def __post_init__(self) -> None:
        for name in sorted({"loss", "beta"} & set(self.loss_options)):
            raise ConfigError(f"recipe: write {name} beside loss_options, not inside")
        config = self.config()
        refused = {
            "loss": config.loss in ("aot", "aot_unpaired"),
            "ld_alpha": config.ld_alpha != 1,
            "exploration_coef": bool(config.exploration_coef),
            "sft_mean": config.needs_sft_divisor,
        }
        if found := [name for name, there in refused.items() if there]:
            raise ConfigError(
                f"recipe: online_dpo has no {found[0]}={getattr(config, found[0])!r}, which needs a column that "
                "pairs of samples do not have; leave it out, or train on written pairs with `rlhf offline dpo`"
            )
        if not self.min_score_gap >= 0:
            raise ConfigError(f"recipe: min_score_gap must not be negative, got {self.min_score_gap}")

    def config(self) -> DPOConfig:
        """That of the loss."""
        return config_from(
            DPOConfig, {**self.loss_options, "loss": self.loss, "beta": self.beta}, what="online_dpo"
        )

    @property
    def learns_from_pairs(self) -> bool:
        """Always."""
        return True

    @property
    def needs_critic(self) -> bool:
        """Never."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Unless the loss is `reference_free`."""
        return self.config().needs_reference

    @property
    def needs_greedy_scores(self) -> bool:
        """Never."""
        return False

    @property
    def score_parts(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def min_samples_per_prompt(self) -> int:
        """Two, to compare."""
        return 2

    @property
    def old_outputs(self) -> tuple[str, ...]:
        """None: the loss has no ratio to an older policy."""
        return ()

    @property
    def needs_old_log_probs(self) -> bool:
        """Never."""
        return False

    @property
    def prepares_by_group(self) -> bool:
        """Unless scores are normalised over the batch."""
        return not self.shaping.normalize

    def kl_controller(self) -> KLController:
        """The pull towards the reference is the loss's own."""
        return FixedKL(0.0)

    def policy_loss(self, kl_coef: float | None = None) -> Loss:
        """`dpo`, whatever the coefficient."""
        config = self.config()
        return Loss(function=dpo, config=config, outputs=config.outputs)

    def value_loss(self) -> Loss | None:
        """No critic, no loss."""
        return None

    def prepare(
        self,
        batch: Batch,
        scores: Float[Tensor, " rows"],
        group_ids: Int[Tensor, " rows"],
        kl_coef: float,
    ) -> tuple[Batch, Metrics]:
        """Add `pair_side` [rows] and `ref_log_probs_sum` [rows]; see Recipe.

        A row without a counted token is in no pair. Metrics: `score`, `score_group_std`, `equal_score_groups`,
        `paired_prompts` (share of prompts with a pair), `score_gap` (best minus worst, mean over pairs).
        """
        scores, batch, metrics = shape_scores(scores, batch, self.shaping, has_baseline=True)
        metrics |= group_metrics(scores, group_ids)
        sides = pair_sides(scores, group_ids, batch.response_mask.any(dim=1), min_gap=self.min_score_gap)
        batch = batch.with_columns(**{PAIR_SIDE: sides})
        if self.needs_reference:
            reference = masked_sum(batch["ref_log_probs"], batch.response_mask, dim=1)
            batch = batch.with_columns(ref_log_probs_sum=reference)
        chosen, rejected = sides == 1, sides == 2
        pairs = float(chosen.sum())
        gap = float(scores[chosen].sum() - scores[rejected].sum())
        metrics["paired_prompts"] = Mean(total=pairs, weight=float(group_ids.unique().numel()))
        metrics["score_gap"] = Mean(total=gap, weight=pairs)
        metrics["response_length"] = mean_of(batch.response_mask.count_nonzero(dim=1))
        return batch, metrics


def pair_sides(
    scores: Float[Tensor, " rows"],
    group_ids: Int[Tensor, " rows"],
    eligible: Bool[Tensor, " rows"],
    *,
    min_gap: float = 0.0,
) -> Int[Tensor, " rows"]:
    """1 for the best row of each group, 2 for its worst, 0 for the others and for groups without a gap.

    Of equal rows the first counts.

    >>> pair_sides(torch.tensor([1.0, 3.0, 0.0, 2.0, 2.0]), torch.tensor([0, 0, 0, 1, 1]), torch.ones(5).bool())
    tensor([0, 1, 2, 0, 0])
    """
    rows = scores.numel()
    _, group = group_ids.unique(return_inverse=True)
    count = int(group.max()) + 1 if rows else 0
    places = torch.arange(rows)

    def first(worth: Tensor) -> tuple[Tensor, Tensor]:
        """The largest worth of each group, and the first row that has it."""
        worth = worth.masked_fill(~eligible, -torch.inf)
        largest = worth.new_full((count,), -torch.inf).scatter_reduce(0, group, worth, "amax")
        there = torch.where(worth == largest[group], places, rows)
        return largest, places.new_full((count,), rows).scatter_reduce(0, group, there, "amin")

    (best, chosen), (worst, rejected) = first(scores), first(-scores)
    paired = best + worst > min_gap  # worst is the negative of the lowest score; -inf where no row is eligible
    sides = torch.zeros(rows, dtype=torch.long)
    sides[chosen[paired]] = 1
    sides[rejected[paired]] = 2
    return sides
