"""The online algorithms: GRPO with its relatives, which need no critic, and PPO, which has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float, Int
from rlhf_core import Batch, ConfigError, Loss, Mean, config_from, mean_of
from torch import Tensor

from rlhf_algos.advantages.groups import group_statistics
from rlhf_algos.advantages.registry import estimator
from rlhf_algos.advantages.returns import discounted_returns, gae, spread_scores, whiten
from rlhf_algos.advantages.reward_shaping import place_scores, shape_scores, token_rewards
from rlhf_algos.kl import KLEstimator
from rlhf_algos.losses.online.value import ValueClipConfig, value_clip
from rlhf_algos.recipes.policy_recipe import (
    KLPlace,
    Metrics,
    PolicyRecipe,
    Recipe,
    reference_kl,
    with_old_log_probs,
)

__all__ = ["GRPO", "PPO", "PolicyRecipe", "Recipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(PolicyRecipe):
    """Group-relative and REINFORCE-style algorithms: scores against a baseline, no critic.

    GRPO, Dr. GRPO, DAPO, GSPO, RLOO, REINFORCE++, ReMax and OPO are settings of this one; see
    `rlhf_algos.recipes.named`.
    """

    advantage: str = "grpo"
    """grpo, rloo, reinforce (no baseline), opo, remax, group_mean, or `module:function` of your own, called as
    f(scores [rows], group_ids [rows], batch, **advantage_options) -> [rows] or [rows, length]."""
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the estimator: scale, eps, unbiased, singleton for `grpo`."""
    gamma: float = 1.0
    """Discount per sampled token; below 1 later tokens get more of the score (OpenRLHF)."""
    whiten: bool = False
    """Normalise the token advantages over the whole batch (REINFORCE++, OpenRLHF)."""
    whiten_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `advantages.whiten`: shift_mean, unbiased, eps, eps_mode."""

    def __post_init__(self) -> None:
        PolicyRecipe.__post_init__(self)
        estimator(self.advantage)

    @property
    def needs_critic(self) -> bool:
        """Never."""
        return False

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

        Columns read: `old_log_probs` (without it `rollout_log_probs` stands in), `ref_log_probs` if there is a
        reference, `truncated` for truncation penalties, `greedy_scores` [rows] for ReMax.
        """
        batch = with_old_log_probs(batch)
        scores, batch, metrics = shape_scores(scores, batch, self.shaping, has_baseline=True)
        metrics |= _group_metrics(scores, group_ids)
        if self.kl_in != "reward":
            metrics |= reference_kl(batch, self.kl_estimator)
        if self.kl_in == "score" and kl_coef:
            rewards, _ = token_rewards(scores, batch, kl_coef=kl_coef, kl_estimator=self.kl_estimator)
            # The score itself is kept for a row without tokens, which has nowhere to put a reward.
            scores = scores + (rewards - place_scores(scores, batch.response_mask)).sum(dim=1)
        advantages = estimator(self.advantage)(scores, group_ids, batch, **self.advantage_options)
        if advantages.dim() == 1:
            if self.shaping.clip is not None and self.shaping.clip_after_baseline:
                advantages = advantages.clamp(*self.shaping.clip)
            coef = kl_coef if self.kl_in == "reward" else 0.0
            if coef or self.gamma != 1:
                rewards, kl = token_rewards(advantages, batch, kl_coef=coef, kl_estimator=self.kl_estimator)
                advantages = discounted_returns(rewards, batch.response_mask, gamma=self.gamma)
                metrics |= kl
            else:
                advantages = spread_scores(advantages, batch.response_mask)
        if self.whiten:
            advantages = whiten(advantages, batch.response_mask, **self.whiten_options)
        return self.finish(batch.with_columns(advantages=advantages), metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class PPO(PolicyRecipe):
    """PPO with a critic and generalised advantage estimation."""

    kl_in: KLPlace = "reward"
    kl_estimator: KLEstimator = "k1"
    gamma: float = 1.0
    """Discount per sampled token."""
    lam: float = 0.95
    """Decay of GAE per sampled token."""
    whiten: bool = True
    """Normalise the advantages over the whole batch."""
    whiten_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `advantages.whiten`: shift_mean, unbiased, eps, eps_mode."""
    value_loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ValueClipConfig`."""

    def __post_init__(self) -> None:
        PolicyRecipe.__post_init__(self)
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"PPO: {name} must be in [0, 1], got {getattr(self, name)}")
        self.value_loss()

    @property
    def needs_critic(self) -> bool:
        """Always."""
        return True

    def value_loss(self) -> Loss | None:
        """See Recipe."""
        config = config_from(ValueClipConfig, self.value_loss_options, what="value_loss_options")
        return Loss(function=value_clip, config=config, outputs=("values",))

    def prepare(
        self,
        batch: Batch,
        scores: Float[Tensor, " rows"],
        group_ids: Int[Tensor, " rows"],
        kl_coef: float,
    ) -> tuple[Batch, Metrics]:
        """Add `advantages`, `returns` and `old_values` [rows, length] (and `importance_weights`); see Recipe.

        Columns read: `values`, `old_log_probs` (without it `rollout_log_probs` stands in), `ref_log_probs` if there
        is a reference, `truncated` for truncation penalties, `rewards` [rows, length] if parts of the scores fell
        at certain tokens.
        """
        batch = with_old_log_probs(batch)
        scores, batch, metrics = shape_scores(scores, batch, self.shaping)
        coef = 0.0 if self.kl_in == "loss" else kl_coef
        rewards, kl = token_rewards(scores, batch, kl_coef=coef, kl_estimator=self.kl_estimator)
        mask = batch.response_mask
        if "rewards" in batch:
            # What the score says of single turns or steps is given there, the rest of it at the end.
            steps = batch["rewards"].masked_fill(~mask, 0)
            rewards = rewards + steps - place_scores(steps.sum(dim=1), mask)
        advantages, returns = gae(rewards, batch["values"], mask, gamma=self.gamma, lam=self.lam)
        metrics |= kl | {"advantage_before_whitening": mean_of(advantages, mask)}
        if self.whiten:
            advantages = whiten(advantages, mask, **self.whiten_options)
        batch = batch.with_columns(advantages=advantages, returns=returns, old_values=batch["values"])
        return self.finish(batch, metrics)


def _group_metrics(scores: Tensor, group_ids: Tensor) -> Metrics:
    """Spread within groups; a group whose scores are all equal teaches nothing."""
    groups = group_statistics(scores, group_ids)
    share = 1 / groups.count
    flat = groups.squares <= 1e-12
    return {
        "score_group_std": Mean(total=float((groups.std(unbiased=True) * share).sum()), weight=float(share.sum())),
        "equal_score_groups": Mean(total=float((share * flat).sum()), weight=float(share.sum())),
    }
