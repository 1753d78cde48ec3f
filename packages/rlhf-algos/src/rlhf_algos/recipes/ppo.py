"""PPO with a critic and generalised advantage estimation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxtyping import Float, Int
from rlhf_core import Batch, ConfigError, Loss, config_from, mean_of
from torch import Tensor

from rlhf_algos.advantages.returns import (
    WhitenConfig,
    between_turns,
    gae,
    length_adaptive_lam,
    turn_gae,
    whiten,
)
from rlhf_algos.advantages.reward_shaping import placed_rewards, shape_scores
from rlhf_algos.choices import check_choices
from rlhf_algos.kl import KLEstimator
from rlhf_algos.losses.online.value import ValueClipConfig, value_clip
from rlhf_algos.recipes.recipe import KLPlace, Metrics, PolicyRecipe, reference_kl, with_old_log_probs

GAEAction = Literal["token", "turn"]
"""What GAE takes for one action: a `token`, or a whole `turn` between two answers of the environment, whose tokens
then have one advantage (see `turn_gae`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPO(PolicyRecipe):
    """PPO with a critic and generalised advantage estimation."""

    kl_in: KLPlace = "reward"
    kl_estimator: KLEstimator = "k1"
    gamma: float = 1.0
    """Discount per sampled token."""
    lam: float = 0.95
    """Decay of GAE per sampled token."""
    lam_critic: float | None = None
    """Decay of GAE for the critic's returns; None means lam. 1 trains it on what was earned (VC-PPO, VAPO:
    decoupled GAE), which with steps of the critic alone at the start (`train.critic_warmup_steps`; VAPO: 50) is
    their value pretraining."""
    action: GAEAction = "token"
    """See `GAEAction`."""
    turn_gamma: float | None = None
    """Discount from the last token of a turn to the next turn; None means gamma (see `between_turns`)."""
    turn_lam: float | None = None
    """Decay from the last token of a turn to the next turn; None means lam."""
    length_alpha: float | None = None
    """The decay for the policy follows the length of the response in place of lam (see `length_adaptive_lam`);
    VAPO: 0.05. None switches it off."""
    whiten: bool = True
    """Normalise the advantages over the whole batch."""
    whiten_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `WhitenConfig`: kind, unbiased, eps, eps_mode."""
    whiten_rewards: bool = False
    """Bring the token rewards to unit variance around their mean first (`keep_mean`; TRL's PPO can)."""
    value_loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ValueClipConfig`."""

    def __post_init__(self) -> None:
        PolicyRecipe.__post_init__(self)
        check_choices("PPO", self, action=GAEAction)
        for name in ("gamma", "lam", "lam_critic", "turn_gamma", "turn_lam"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"PPO: {name} must be in [0, 1], got {getattr(self, name)}")
        if self.length_alpha is not None and self.length_alpha <= 0:
            raise ConfigError(f"PPO: length_alpha must be positive, got {self.length_alpha}; 0.05 is VAPO's")
        by_token = (self.length_alpha, self.turn_gamma, self.turn_lam)
        if self.action == "turn" and any(value is not None for value in by_token):
            raise ConfigError(
                "PPO: with action: turn, gamma and lam count per turn; leave out length_alpha, turn_gamma and "
                "turn_lam"
            )
        config_from(WhitenConfig, self.whiten_options, what="whiten_options")
        self.value_loss()

    @property
    def needs_critic(self) -> bool:
        """Always."""
        return True

    @property
    def needs_old_log_probs(self) -> bool:
        """As `PolicyRecipe` says; of another `prepare` nothing is known."""
        return type(self).prepare is not PPO.prepare or PolicyRecipe.needs_old_log_probs.fget(self)  # type: ignore

    @property
    def whitening(self) -> WhitenConfig | None:
        """See PreparesInParts."""
        if not self.whiten:
            return None
        return config_from(WhitenConfig, self.whiten_options, what="whiten_options")

    @property
    def goes_by_token(self) -> bool:
        """Always; see PreparesInParts."""
        return True

    def unwhitened(self) -> PPO:
        """See PreparesInParts."""
        return replace(self, whiten=False)

    @property
    def prepares_by_group(self) -> bool:
        """If nothing is whitened or else looks at the whole batch; False with a `prepare` of one's own."""
        own = type(self).prepare is not PPO.prepare
        return self.rows_are_apart and not (own or self.whiten or self.whiten_rewards)

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

        Columns read: `values`, `old_log_probs` (see `needs_old_log_probs`), `ref_log_probs` if there is a
        reference, `truncated` for truncation penalties, `rewards` [rows, length] if parts of the scores fell
        at certain tokens.
        """
        batch = with_old_log_probs(batch, self.old_log_probs)
        raw_scores = scores
        scores, batch, metrics = shape_scores(scores, batch, self.shaping)
        mask = batch.response_mask
        if self.kl_in != "reward":
            metrics |= reference_kl(batch, self.kl_estimator)
        if self.kl_in == "score" and kl_coef:
            scores = scores - kl_coef * self.penalty(batch).sum(dim=1)
        rewards = placed_rewards(scores, batch)
        if self.kl_in == "reward" and (kl_coef or "ref_log_probs" in batch):
            penalty = self.penalty(batch)
            rewards = rewards - kl_coef * penalty
            metrics["kl"] = mean_of(penalty, mask)
        if self.whiten_rewards:
            unbiased = config_from(WhitenConfig, self.whiten_options, what="whiten_options").unbiased
            rewards = whiten(rewards, mask, WhitenConfig(kind="keep_mean", unbiased=unbiased))
        lam = self.lam if self.length_alpha is None else length_adaptive_lam(mask, self.length_alpha)
        advantages, returns = self._gae(rewards, batch["values"], mask, lam)
        if self.lam_critic is not None:
            returns = self._gae(rewards, batch["values"], mask, self.lam_critic)[1]
        metrics["advantage_before_whitening"] = mean_of(advantages, mask)
        if self.whitening is not None:
            advantages = whiten(advantages, mask, self.whitening)
        batch = batch.with_columns(advantages=advantages, returns=returns, old_values=batch["values"])
        return self.finish(batch, raw_scores, group_ids, metrics)

    def _gae(self, rewards: Tensor, values: Tensor, mask: Tensor, lam: float | Tensor) -> tuple[Tensor, Tensor]:
        if self.action == "turn":
            return turn_gae(rewards, values, mask, gamma=self.gamma, lam=float(lam))
        gamma: float | Tensor = self.gamma
        if self.turn_gamma is not None:
            gamma = between_turns(mask, gamma, self.turn_gamma)
        if self.turn_lam is not None:
            lam = between_turns(mask, lam, self.turn_lam)
        return gae(rewards, values, mask, gamma=gamma, lam=lam)
