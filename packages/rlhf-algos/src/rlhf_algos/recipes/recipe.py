"""What the online loop asks of an algorithm, and the fields that all algorithms share. All settings, no state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from rlhf_core import Batch, ConfigError, Loss, Mean, mean_by_parts, mean_of
from torch import Tensor

from rlhf_algos.advantages.groups import group_sum
from rlhf_algos.advantages.returns import WhitenConfig
from rlhf_algos.advantages.reward_shaping import RewardShaping, token_kl
from rlhf_algos.choices import check_choices
from rlhf_algos.kl import AdaptiveKL, FixedKL, KLController, KLEstimator, kl_estimate
from rlhf_algos.losses.online.pretraining import with_likelihood
from rlhf_algos.losses.online.registry import make_policy_loss
from rlhf_algos.losses.online.terms import PolicyTermsConfig
from rlhf_algos.off_policy import OffPolicyCorrection, correct_off_policy

Metrics = dict[str, Mean]

KLPlace = Literal["loss", "score", "reward"]
"""Where the KL penalty goes: into the `loss` (GRPO), summed over the response into its `score` before any baseline
(TRL's RLOO, verl's `use_kl_in_reward`), or into the `reward` of each token after the baseline (PPO, OpenRLHF)."""

OldLogProbs = Literal["trainer", "sampler"]
"""Whose log-probs of the samples the ratios of the policy loss start from: those that the `trainer` computes
again with the weights before the step, or the `sampler`'s own. The latter saves a forward pass, and the loss's
own clipping or masking then bounds the whole way from the sampler (verl's bypass mode, prime-rl)."""


@runtime_checkable
class Recipe(Protocol):
    """An online algorithm."""

    @property
    def needs_critic(self) -> bool:
        """True if the batch must have the column `values` and the critic is trained with `value_loss`."""
        ...

    @property
    def needs_reference(self) -> bool:
        """True if the batch must have the column `ref_log_probs`."""
        ...

    @property
    def needs_greedy_scores(self) -> bool:
        """True if the batch must have the column `greedy_scores` [rows]: the score of the greedy response to the
        same prompt under the same weights (ReMax)."""
        ...

    @property
    def score_parts(self) -> tuple[str, ...]:
        """Parts of the score that the batch must have as columns `score/<part>` [rows]."""
        ...

    @property
    def min_samples_per_prompt(self) -> int:
        """Responses to a prompt below which the algorithm has nothing to learn from."""
        ...

    @property
    def old_outputs(self) -> tuple[str, ...]:
        """What the policy must be asked about the samples before the step, as fields of ModelOutputs: each
        becomes a column `old_<field>` [rows, length]. `log_probs` is among them unless the sampler's own stand
        in."""
        ...

    @property
    def needs_old_log_probs(self) -> bool:
        """True if `prepare` reads `old_log_probs`. False if the first update of the samples may take its own
        log-probs for them: its ratios are then 1, and a run with one update per batch needs no pass to score it."""
        ...

    @property
    def prepares_by_group(self) -> bool:
        """True if `prepare` may be called with some groups at a time: nothing that it adds to a row depends on
        other groups. A run then prepares them on its training ranks."""
        ...

    def kl_controller(self) -> KLController:
        """A new controller of the KL coefficient."""
        ...

    def prepare(
        self,
        batch: Batch,
        scores: Float[Tensor, " rows"],
        group_ids: Int[Tensor, " rows"],
        kl_coef: float,
    ) -> tuple[Batch, Metrics]:
        """The batch with all columns that the losses read, and metrics. `batch` is the whole global batch, or some
        whole groups of it where `prepares_by_group`."""
        ...

    def policy_loss(self, kl_coef: float | None = None) -> Loss:
        """The policy's loss with the controller's coefficient; None means the configured one."""
        ...

    def value_loss(self) -> Loss | None:
        """The critic's loss, if there is a critic."""
        ...


@runtime_checkable
class PreparesInParts(Protocol):
    """A recipe that looks at the whole batch, if at all, only to whiten `advantages` at the end of `prepare`."""

    @property
    def whitening(self) -> WhitenConfig | None:
        """How it whitens the advantages of the whole batch (see `whiten_by`); None if it does not."""
        ...

    @property
    def goes_by_token(self) -> bool:
        """Whether `prepare` goes from token to token, which takes as long for a few rows as for thousands."""
        ...

    def unwhitened(self) -> Recipe:
        """The same recipe without the whitening; its `prepares_by_group` says if parts may be prepared apart."""
        ...


@runtime_checkable
class LearnsText(Protocol):
    """A recipe beside whose policy loss a run can train on text (`data.pretrain`; see `mix_pretraining`)."""

    @property
    def ptx_coef(self) -> float:
        """Weight of the mean negative log-likelihood of the text's tokens; 0 trains on none."""
        ...

    def policy_loss(self, kl_coef: float | None = None) -> Loss:
        """See Recipe; with a weight its config must be a `PolicyTermsConfig`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRecipe:
    """Fields that `GRPO` and `PPO` share."""

    loss: str = "ppo_clip"
    """Name of a policy loss (see `POLICY_LOSSES`), or `module:function` of your own."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of that loss's config: clip_range, aggregation, ... Your own function gets them as the dataclass that
    annotates its third parameter, else as a dict."""
    kl_coef: float = 0.0
    """Coefficient of the KL penalty against the reference; 0 trains without a reference."""
    kl_target: float | None = None
    """KL in nats per token that an adaptive controller steers to; None keeps the coefficient fixed."""
    kl_horizon: int = 10_000
    """Samples over which the adaptive controller reacts."""
    kl_in: KLPlace = "loss"
    """See `KLPlace`."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the penalty; k3 is usual in the loss, k1 in score and reward."""
    kl_value_limit: float = math.inf
    """Clamp on the penalty's KL per token, wherever it goes: 10 in OpenRLHF and in verl's k3, none in TRL."""
    kl_log_ratio_limit: float = 20.0
    """Clamp on log(policy / reference) before the exponential of k3, wherever the penalty goes."""
    track_kl: bool = False
    """Report the KL although kl_coef is 0; keeps a reference model."""
    report_entropy: bool = True
    """Report the policy's entropy even where the loss does not need it."""
    shaping: RewardShaping = field(default_factory=RewardShaping)
    """What happens to the scores first."""
    off_policy: tuple[OffPolicyCorrection, ...] = ()
    """Importance weights against the sampler's log-probs."""
    old_log_probs: OldLogProbs = "trainer"
    """See `OldLogProbs`."""
    likelihood_coef: float = 0.0
    """Weight of the negative log-likelihood of the right responses beside the policy loss (VAPO: 0.1)."""
    right_above: float = 0.0
    """A response is right, for `likelihood_coef`, with a score above this, before any shaping."""
    ptx_coef: float = 0.0
    """Weight of the negative log-likelihood of the text in `data.pretrain` beside the policy loss, mean over its
    tokens (PPO-ptx, Ouyang et al. 2022; InstructGPT: 27.8, OpenRLHF: 0.05)."""

    def __post_init__(self) -> None:
        check_choices("recipe", self, kl_in=KLPlace, kl_estimator=KLEstimator, old_log_probs=OldLogProbs)
        if self.old_log_probs == "sampler" and self.off_policy:
            raise ConfigError(
                "recipe: off_policy weighs the trainer's log-probs against the sampler's, which "
                "old_log_probs: sampler puts in their place; leave one of the two out"
            )
        if self.kl_coef < 0:
            raise ConfigError(f"recipe: kl_coef must not be negative, got {self.kl_coef}")
        if self.kl_target is not None and not self.kl_coef:
            raise ConfigError(
                "recipe: kl_target scales kl_coef, which is 0; write a positive kl_coef to start from"
            )
        for name in ("kl_value_limit", "kl_log_ratio_limit"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"recipe: {name} must be positive, got {getattr(self, name)}")
        if self.likelihood_coef < 0:
            raise ConfigError(f"recipe: likelihood_coef must not be negative, got {self.likelihood_coef}")
        if not (self.ptx_coef >= 0 and math.isfinite(self.ptx_coef)):
            raise ConfigError(f"recipe: ptx_coef must be a finite number and not negative, got {self.ptx_coef}")
        for name in ("likelihood_coef", "ptx_coef"):
            if getattr(self, name) and not isinstance(self.policy_loss().config, PolicyTermsConfig):
                raise ConfigError(
                    f"recipe: {name} is a term of our own policy losses, which {self.loss!r} is not; derive its "
                    "config from rlhf_algos.PolicyTermsConfig and end it with finish_policy_loss"
                )
        for name in sorted({"kl_coef", *self._kl_options()} & set(self.loss_options)):
            raise ConfigError(f"recipe: write {name} beside loss_options, not inside")
        self.policy_loss()

    @property
    def needs_reference(self) -> bool:
        """True if there is a KL penalty or the KL is reported."""
        return bool(self.kl_coef) or self.track_kl

    @property
    def needs_greedy_scores(self) -> bool:
        """False unless the algorithm says otherwise."""
        return False

    @property
    def score_parts(self) -> tuple[str, ...]:
        """None unless the algorithm says otherwise."""
        return ()

    @property
    def min_samples_per_prompt(self) -> int:
        """One unless the algorithm says otherwise."""
        return 1

    @property
    def old_outputs(self) -> tuple[str, ...]:
        """`log_probs` unless the sampler's stand in, and what the loss asks for."""
        own = () if self.old_log_probs == "sampler" else ("log_probs",)
        return (*own, *getattr(self.policy_loss().config, "old_outputs", ()))

    @property
    def needs_old_log_probs(self) -> bool:
        """True if a KL penalty goes into scores or rewards, if samples are weighed against the sampler, or if the
        loss chooses tokens by their log-probs. Of a loss of the user's own nothing is known, so True."""
        penalty = self.needs_reference and self.kl_in != "loss"
        chooses = ":" in self.loss or self.policy_loss().config.needs_old_log_probs
        return penalty or bool(self.off_policy) or chooses

    @property
    def prepares_by_group(self) -> bool:
        """False unless the algorithm says otherwise."""
        return False

    @property
    def rows_are_apart(self) -> bool:
        """Whether shaping, corrections and columns of the loss are each row's own: of a loss of the user's own
        nothing is known."""
        alone = not self.shaping.normalize and not self.off_policy  # whose effective sample size is of the batch
        if ":" in self.loss or self.likelihood_coef:
            return False
        config = self.policy_loss().config
        plain = type(config).add_columns is PolicyTermsConfig.add_columns and config.top_entropy == 1
        return alone and plain

    def kl_controller(self) -> KLController:
        """Adaptive if `kl_target` is set."""
        if self.kl_target is None:
            return FixedKL(self.kl_coef)
        return AdaptiveKL(self.kl_coef, target=self.kl_target, horizon=self.kl_horizon)

    def policy_loss(self, kl_coef: float | None = None) -> Loss:
        """See Recipe."""
        coef = self.kl_coef if kl_coef is None else kl_coef
        own = ":" in self.loss
        in_loss = self.kl_in == "loss" and (bool(coef) or (self.track_kl and not own))
        kl = {"kl_coef": coef, **self._kl_options()} if in_loss else {}
        return make_policy_loss(self.loss, {**self.loss_options, **kl}, report_entropy=self.report_entropy)

    def penalty(self, batch: Batch) -> Float[Tensor, "rows length"]:
        """The KL of each sampled token, as it goes into scores and rewards."""
        return token_kl(
            batch,
            self.kl_estimator,
            value_limit=self.kl_value_limit,
            log_ratio_limit=self.kl_log_ratio_limit,
        )

    def finish(
        self, batch: Batch, scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], metrics: Metrics
    ) -> tuple[Batch, Metrics]:
        """Importance weights and the columns of the loss, once `advantages` are there.

        Args:
            batch: the whole global batch.
            scores: as they came, before any shaping.
            group_ids: equal for responses to the same prompt.
            metrics: so far.
        """
        batch, metrics = _finish(batch, self.off_policy, metrics)
        batch = batch.with_columns(prompt_tokens=prompt_tokens(group_ids, batch))
        loss = self.policy_loss()
        if isinstance(loss.config, PolicyTermsConfig):
            batch = loss.config.add_columns(batch)
            if self.likelihood_coef:
                batch = with_likelihood(batch, scores > self.right_above, self.likelihood_coef, loss.config)
        elif add_columns := getattr(loss.function, "add_columns", None):
            batch = add_columns(batch, loss.config)
        return batch, metrics

    def _kl_options(self) -> dict[str, Any]:
        names = ("kl_estimator", "kl_value_limit", "kl_log_ratio_limit")
        return {name: getattr(self, name) for name in names}


def with_old_log_probs(batch: Batch, source: OldLogProbs = "trainer") -> Batch:
    """Let the sampler's log-probs stand in for the old policy's, by choice alone.

    With the source `trainer` the batch stays as it is: without `old_log_probs` those of the update count.

    Raises:
        ConfigError: the sampler did not say the log-prob of a sampled token.
    """
    if source == "trainer":
        return batch
    sampler = batch["rollout_log_probs"]
    if (sampler.isnan() & batch.response_mask).any():
        raise ConfigError(
            "the sampler gave no log-prob for some of the tokens it sampled, so that it cannot stand in for the "
            "trainer; write old_log_probs: trainer"
        )
    return batch.with_columns(old_log_probs=sampler)


def prompt_tokens(group_ids: Int[Tensor, " rows"], batch: Batch) -> Float[Tensor, " rows"]:
    """Counted tokens of all responses to each row's prompt: the column of the aggregation `prompt_mean`."""
    return group_sum(batch.response_mask.count_nonzero(dim=1).float(), group_ids)


def reference_kl(batch: Batch, kind: KLEstimator) -> Metrics:
    """Metric `reference_kl`: mean KL per token against the reference before the step, if there is a reference.

    Without `old_log_probs` the update measures it.
    """
    if "ref_log_probs" not in batch or "old_log_probs" not in batch:
        return {}
    estimate = partial(kl_estimate, estimator=kind)
    mean = mean_by_parts(estimate, batch.response_mask, batch["old_log_probs"], batch["ref_log_probs"])
    return {"reference_kl": mean}


def advantage_metrics(advantages: Tensor, mask: Tensor) -> Metrics:
    """Metrics of advantages as the loss reads them: `advantage` and `advantage_abs`, means over counted tokens."""
    return {
        "advantage": mean_of(advantages, mask),
        "advantage_abs": mean_by_parts(torch.abs, mask, advantages),
    }


def _finish(batch: Batch, corrections: tuple[OffPolicyCorrection, ...], metrics: Metrics) -> tuple[Batch, Metrics]:
    mask = batch.response_mask
    metrics |= advantage_metrics(batch["advantages"], mask)
    metrics["response_length"] = mean_of(mask.count_nonzero(dim=1))
    missing = [name for name in ("old_log_probs", "rollout_log_probs") if name not in batch]
    if not missing:
        batch, more = correct_off_policy(batch, corrections)
        metrics |= more
    elif corrections:
        raise ConfigError(
            f"off-policy correction weighs the trainer's log-probs against the sampler's and needs the column(s) "
            f"{', '.join(missing)}; score the batch with the policy, and keep the sampler's log-probs"
        )
    if not torch.isfinite(batch["advantages"]).all():
        raise ValueError("advantages are not finite; check the scores and the critic's values for NaN or infinity")
    return batch, metrics
