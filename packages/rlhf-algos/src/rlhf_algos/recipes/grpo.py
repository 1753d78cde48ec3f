"""GRPO and its relatives: scores against a baseline, no critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from rlhf_core import Batch, ConfigError, Loss, Mean, config_from, mean_of
from torch import Tensor

from rlhf_algos.advantages.estimator import Advantage
from rlhf_algos.advantages.groups import group_statistics
from rlhf_algos.advantages.registry import make_advantage
from rlhf_algos.advantages.returns import WhitenConfig, discounted_returns, spread_scores, whiten
from rlhf_algos.advantages.reward_shaping import shape_scores
from rlhf_algos.advantages.steps import step_advantages
from rlhf_algos.recipes.recipe import Metrics, PolicyRecipe, reference_kl, with_old_log_probs


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(PolicyRecipe):
    """Group-relative and REINFORCE-style algorithms: scores against a baseline, no critic.

    GRPO, Dr. GRPO, DAPO, GSPO, RLOO, REINFORCE++, ReMax, OPO and more are settings of it; see `NAMED_RECIPES`.
    """

    advantage: str = "grpo"
    """Name of an advantage estimator (see `ADVANTAGES`), or `module:function` of your own, called as
    f(scores [rows], group_ids [rows], batch, config) -> [rows] or [rows, length]."""
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the estimator's config: scale, eps, unbiased, singleton for `grpo`. Your own function gets them as
    the dataclass that annotates its fourth parameter, else as a dict."""
    gamma: float = 1.0
    """Discount per sampled token; below 1 later tokens get more of the score (OpenRLHF)."""
    whiten: bool = False
    """Normalise the token advantages over the whole batch (REINFORCE++, OpenRLHF)."""
    whiten_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `WhitenConfig`: kind, unbiased, eps, eps_mode."""

    def __post_init__(self) -> None:
        PolicyRecipe.__post_init__(self)
        in_score = bool(self.kl_coef) and self.kl_in == "score"
        if self.score_parts and (in_score or self.shaping.changes_scores):
            raise ConfigError(
                f"recipe: the advantage {self.advantage!r} reads the parts of a score and not the score, which "
                f"{'kl_in: score' if in_score else 'shaping'} changes; "
                f"write {'kl_in: loss' if in_score else 'the penalties as parts'}"
            )
        config_from(WhitenConfig, self.whiten_options, what="whiten_options")

    def estimator(self) -> Advantage:
        """The advantage estimator with its config."""
        return make_advantage(self.advantage, self.advantage_options)

    @property
    def needs_critic(self) -> bool:
        """Never."""
        return False

    @property
    def needs_greedy_scores(self) -> bool:
        """As the estimator says."""
        return self.estimator().says("needs_greedy_scores")

    @property
    def score_parts(self) -> tuple[str, ...]:
        """As the estimator says."""
        return self.estimator().says("score_parts")

    @property
    def min_samples_per_prompt(self) -> int:
        """As the estimator says."""
        return self.estimator().says("min_samples_per_prompt")

    @property
    def old_outputs(self) -> tuple[str, ...]:
        """As the loss and the estimator say."""
        needed = (*PolicyRecipe.old_outputs.fget(self), *self.estimator().says("old_outputs"))  # type: ignore
        return tuple(dict.fromkeys(needed))

    @property
    def needs_old_log_probs(self) -> bool:
        """As the estimator says, too; of one of the user's own nothing is known, nor of another `prepare`."""
        own = ":" in self.advantage or type(self).prepare is not GRPO.prepare
        return own or bool(self.estimator().says("old_outputs")) or PolicyRecipe.needs_old_log_probs.fget(self)  # type: ignore

    @property
    def prepares_by_group(self) -> bool:
        """As the estimator says, if nothing else looks at the whole batch; False with a `prepare` of one's own."""
        own = type(self).prepare is not GRPO.prepare
        apart = self.rows_are_apart and bool(self.estimator().says("by_groups"))
        return apart and not (own or self.whiten)

    @property
    def whitening(self) -> WhitenConfig | None:
        """See PreparesInParts."""
        if not self.whiten:
            return None
        return config_from(WhitenConfig, self.whiten_options, what="whiten_options")

    @property
    def goes_by_token(self) -> bool:
        """Where scores are spread with a discount, or less the KL of the tokens; see PreparesInParts."""
        return self.gamma != 1 or self.kl_in == "reward"

    def unwhitened(self) -> GRPO:
        """See PreparesInParts."""
        return replace(self, whiten=False)

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
        """Add `advantages` [rows, length] (and `importance_weights`); see Recipe.

        Columns read: `old_log_probs` (see `needs_old_log_probs`), `ref_log_probs` if there is a reference,
        `truncated` for truncation penalties, `rewards` [rows, length] if parts of the scores fell at
        certain tokens (see `step_advantages`), and what the estimator asks for.
        """
        batch, advantages, metrics = self.task_advantages(batch, scores, group_ids, kl_coef)
        return self.finish(batch.with_columns(advantages=advantages), scores, group_ids, metrics)

    def task_advantages(
        self, batch: Batch, scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], kl_coef: float
    ) -> tuple[Batch, Float[Tensor, "rows length"], Metrics]:
        """What the scores make of each token, before the columns of the loss; the batch may lose masked tokens."""
        batch = with_old_log_probs(batch, self.old_log_probs)
        scores, batch, metrics = shape_scores(scores, batch, self.shaping, has_baseline=True)
        metrics |= group_metrics(scores, group_ids)
        if self.kl_in != "reward":
            metrics |= reference_kl(batch, self.kl_estimator)
        if self.kl_in == "score" and kl_coef:
            scores = scores - kl_coef * self.penalty(batch).sum(dim=1)
        advantages = step_advantages(self.estimator(), scores, group_ids, batch)
        if self.shaping.clip is not None and self.shaping.clip_after_baseline:
            advantages = advantages.clamp(*self.shaping.clip)
        if advantages.dim() == 1:
            advantages = spread_scores(advantages, batch.response_mask)
        advantages, kl = self._discounted(advantages, batch, kl_coef if self.kl_in == "reward" else 0.0)
        if self.whitening is not None:
            advantages = whiten(advantages, batch.response_mask, self.whitening)
        return batch, advantages, metrics | kl

    def _discounted(
        self, advantages: Float[Tensor, "rows length"], batch: Batch, kl_coef: float
    ) -> tuple[Float[Tensor, "rows length"], Metrics]:
        """The advantages with the KL of the tokens from each on taken off, and both discounted."""
        mask, metrics, rewards = batch.response_mask, {}, None
        if self.kl_in == "reward" and (kl_coef or "ref_log_probs" in batch):
            penalty = self.penalty(batch)
            metrics["kl"] = mean_of(penalty, mask)
            rewards = _differences(advantages, mask) - kl_coef * penalty if kl_coef else None
        if rewards is None and self.gamma != 1:
            rewards = _differences(advantages, mask)
        if rewards is None:
            return advantages, metrics
        return discounted_returns(rewards, mask, gamma=self.gamma), metrics


def _differences(advantages: Tensor, mask: Tensor) -> Tensor:
    """Token rewards whose undiscounted returns are these advantages: each minus the next sampled token's."""
    following = torch.zeros_like(advantages)
    carried = advantages.new_zeros(advantages.shape[0])
    for position in reversed(range(advantages.shape[1])):
        following[:, position] = carried
        carried = torch.where(mask[:, position], advantages[:, position], carried)
    return (advantages - following).masked_fill(~mask, 0)


def group_metrics(scores: Tensor, group_ids: Tensor) -> Metrics:
    """Spread within groups; a group whose scores are all equal teaches nothing."""
    groups = group_statistics(scores, group_ids)
    share = 1 / groups.count
    flat = groups.squares <= 1e-12
    return {
        "score_group_std": Mean(total=float((groups.std(unbiased=True) * share).sum()), weight=float(share.sum())),
        "equal_score_groups": Mean(total=float((share * flat).sum()), weight=float(share.sum())),
    }
