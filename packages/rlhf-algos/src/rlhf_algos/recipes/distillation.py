"""On-policy distillation: the student samples, a teacher judges every token of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from rlhf_core import Batch, ConfigError, mean_of
from torch import Tensor

from rlhf_algos.advantages.returns import discounted_returns
from rlhf_algos.recipes.grpo import GRPO
from rlhf_algos.recipes.recipe import Metrics, reference_kl, with_old_log_probs

TAUGHT = "taught"
"""A column [rows]: whether the teacher has judged the row. Without it all rows are."""


@runtime_checkable
class LearnsFromTeacher(Protocol):
    """A recipe whose batches must have the column `teacher_log_probs` [rows, length]: the log-probs that a frozen
    teacher gives the sampled tokens, at the temperature of the samples."""

    @property
    def needs_scores(self) -> bool:
        """True if it learns from the scores of the task, too; a run may be without any reward otherwise."""
        ...

    @property
    def needs_teacher(self) -> bool:
        """True if it reads `teacher_log_probs`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OnPolicyDistillation(GRPO):
    """The gap between teacher and student at each token that the student sampled, as the token's advantage.

    A_t = sum_{i >= t} teacher_gamma^(i - t) (teacher_log_probs_i - old_log_probs_i), over sampled tokens. With
    teacher_gamma 0 this is the negative reverse KL of the token alone (Lu 2025, "On-Policy Distillation"; Qwen3),
    with 1 the whole gradient of the response's reverse KL (MiniLLM, Gu et al. 2024, 2306.08543); to learn on the
    student's own samples is GKD's idea (Agarwal et al. 2024, 2306.13649). With `reward_coef` the group-relative
    advantage of the task's score is added, with all settings of `GRPO`.
    """

    teacher_coef: float = 1.0
    """Weight of the gap to the teacher."""
    teacher_gamma: float = 0.0
    """Discount per sampled token of the gaps that follow a token; 0 charges a token with its own gap alone."""
    teacher_log_ratio_limit: float = 20.0
    """Clamp on log(teacher / student) of a token."""
    reward_coef: float = 0.0
    """Weight of the advantage of the task's score; 0 learns from the teacher alone and needs no reward."""

    def __post_init__(self) -> None:
        GRPO.__post_init__(self)
        if not (math.isfinite(self.teacher_coef) and self.teacher_coef > 0):
            raise ConfigError(
                f"recipe: teacher_coef must be positive, got {self.teacher_coef}; without a teacher write grpo"
            )
        if not (math.isfinite(self.reward_coef) and self.reward_coef >= 0):
            raise ConfigError(f"recipe: reward_coef must not be negative, got {self.reward_coef}")
        if not 0 <= self.teacher_gamma <= 1:
            raise ConfigError(f"recipe: teacher_gamma must be in [0, 1], got {self.teacher_gamma}")
        if not self.teacher_log_ratio_limit > 0:
            raise ConfigError(
                f"recipe: teacher_log_ratio_limit must be positive, got {self.teacher_log_ratio_limit}"
            )
        if self.whiten:
            raise ConfigError(
                "recipe: whiten would take the scale of the gap to the teacher away; leave it out, and weigh the "
                "two parts by teacher_coef and reward_coef"
            )
        if not self.reward_coef:
            self._check_no_scores()

    def _check_no_scores(self) -> None:
        """Refuse settings of scores where no score is learnt from."""
        inert = {
            "kl_in": self.kl_in != "loss",
            "shaping": self.shaping.normalize or self.shaping.changes_scores,
            "likelihood_coef": bool(self.likelihood_coef),
        }
        if found := [name for name, there in inert.items() if there]:
            raise ConfigError(
                f"recipe: {found[0]} is about scores, and with reward_coef=0 none is learnt from; write a positive "
                "reward_coef, or leave it out"
            )

    @property
    def needs_teacher(self) -> bool:
        """Always."""
        return True

    @property
    def needs_scores(self) -> bool:
        """With `reward_coef`."""
        return bool(self.reward_coef)

    @property
    def needs_greedy_scores(self) -> bool:
        """As the estimator says, where scores count."""
        return self.needs_scores and self.estimator().says("needs_greedy_scores")

    @property
    def score_parts(self) -> tuple[str, ...]:
        """As the estimator says, where scores count."""
        return self.estimator().says("score_parts") if self.needs_scores else ()

    @property
    def min_samples_per_prompt(self) -> int:
        """As the estimator says, where scores count; else one."""
        return self.estimator().says("min_samples_per_prompt") if self.needs_scores else 1

    @property
    def needs_old_log_probs(self) -> bool:
        """Always: the gap is that before the update."""
        return True

    @property
    def prepares_by_group(self) -> bool:
        """As GRPO with the same estimator: the gap is each row's own."""
        return self.rows_are_apart and (not self.needs_scores or bool(self.estimator().says("by_groups")))

    def prepare(
        self,
        batch: Batch,
        scores: Float[Tensor, " rows"],
        group_ids: Int[Tensor, " rows"],
        kl_coef: float,
    ) -> tuple[Batch, Metrics]:
        """Add `advantages` [rows, length]; see Recipe.

        Columns read: `teacher_log_probs`, `old_log_probs`, `taught` if there (the gap of other rows is 0), and with
        `reward_coef` those of `GRPO.prepare`. Metrics:
        `teacher/reverse_kl` (nats per sampled token, estimated by the samples: its mean can be negative in a small
        batch), `teacher/log_prob`, `teacher/taught` (share of rows) with that column, `advantage_task_abs` with
        `reward_coef`.
        """
        raw_scores, task = scores, None
        if self.needs_scores:
            batch, task, metrics = self.task_advantages(batch, scores, group_ids, kl_coef)
        else:
            batch = with_old_log_probs(batch, self.old_log_probs)
            metrics = reference_kl(batch, self.kl_estimator)
        mask, limit = batch.response_mask, self.teacher_log_ratio_limit
        if TAUGHT in batch:
            metrics["teacher/taught"] = mean_of(batch[TAUGHT].float())
        judged = mask & batch[TAUGHT].bool()[:, None] if TAUGHT in batch else mask
        gap = (batch["teacher_log_probs"] - batch["old_log_probs"]).masked_fill(~judged, 0)
        metrics["teacher/reverse_kl"] = mean_of(-gap, judged)
        metrics["teacher/log_prob"] = mean_of(batch["teacher_log_probs"].masked_fill(~judged, 0), judged)
        advantages = gap.clamp(-limit, limit)
        if self.teacher_gamma:
            advantages = discounted_returns(advantages, mask, gamma=self.teacher_gamma)
        advantages = self.teacher_coef * advantages
        if task is not None:
            advantages = advantages + self.reward_coef * task
            metrics["advantage_task_abs"] = mean_of(task.abs().masked_fill(~mask, 0), mask)
        return self.finish(batch.with_columns(advantages=advantages), raw_scores, group_ids, metrics)
