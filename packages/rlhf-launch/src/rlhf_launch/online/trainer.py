"""What a step does with its samples: score them, estimate advantages, take the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from rlhf_algos import KLController, Recipe
from rlhf_core import Batch, Mean, ModelOutputs, StepReport, order_in_groups
from rlhf_rollout import ScoredGroup

from rlhf_launch.bundles.trace import Order, StepTrace
from rlhf_launch.online.metrics import PhaseClock, sample_metrics, step_metrics
from rlhf_launch.samples.groups import collate_groups, staleness
from rlhf_launch.workers.begun import Begun, in_turns, results_of
from rlhf_launch.workers.train_group import TrainGroup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """How often the samples of a step are trained on, and in which portions."""

    minibatches: int = 1
    """Optimizer steps per pass."""
    epochs: int = 1
    """Passes over the samples."""
    critic_warmup_steps: int = 0
    """Steps at the start of the run in which only the critic is trained."""
    seed: int = 0
    """Seed of the order of the samples."""

    def order(self, groups: Sequence[int], step: int, *, ranks: int) -> Order:
        """The rows of each optimizer step of all passes, for the samples of the step after `step` steps.

        Rows of one group, which share a prompt, are in one portion wherever there are enough groups: the prompt is
        run once for them.
        """
        drawn: Order = []
        for epoch in range(self.epochs):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step * 101 + epoch)
            order = torch.randperm(len(groups), generator=generator).tolist()
            # A step that dynamic sampling left short has fewer minibatches, so that every rank has a row in each.
            parts = max(1, min(self.minibatches, len(groups) // ranks))
            drawn += order_in_groups(groups, parts, order)
        return drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """The training engines of a run and the algorithm that they follow."""

    policy: TrainGroup
    critic: TrainGroup | None = None
    reference: TrainGroup | None = None
    recipe: Recipe
    kl: KLController
    plan: UpdatePlan = field(default_factory=UpdatePlan)
    rewards: tuple[TrainGroup, ...] = ()
    """Reward models, which score samples as they come; here for their idle seconds."""
    shared: tuple[frozenset[str], ...] = ()
    """Names of roles that share devices and so work in turns; roles of no such set work at the same time."""

    @property
    def trained(self) -> list[TrainGroup]:
        """The engines whose weights change."""
        return [self.policy, *([self.critic] if self.critic is not None else [])]

    def step(
        self, groups: Sequence[ScoredGroup], step: int, clock: PhaseClock, trace: StepTrace | None = None
    ) -> tuple[Batch, dict[str, float]]:
        """Train on the groups of a step; returns the batch with all its columns, and the step's metrics.

        Args:
            groups: the samples with their scores.
            step: completed steps.
            clock: measures the phases.
            trace: gets what is known as soon as it is known; if it has an order of the rows, that is followed.
        """
        trace = trace or StepTrace(step=step + 1, groups=groups)
        with clock("score"):
            batch = trace.batch = self.score(collate_groups(groups))
        kl_coef = trace.kl_coef = self.kl.value
        batch, prepared = self.recipe.prepare(batch, batch["scores"], batch["group_ids"], kl_coef=kl_coef)
        trace.batch = batch
        with clock("train"):
            reports = self.update(batch, step, trace)
        self.kl.update(_kl_of(prepared), batch.rows)
        metrics = (
            sample_metrics(groups, batch)
            | staleness(groups, step)
            | {name: mean.value for name, mean in prepared.items()}
            | step_metrics(reports)
            | self.memory()
            | {"kl_coef": kl_coef}
        )
        trace.metrics = metrics
        return batch, metrics

    def score(self, batch: Batch) -> Batch:
        """Add what the algorithm needs of the policy before the update (`old_log_probs`, ...), of the reference
        (`ref_log_probs`) and of the critic (`values`); roles with devices of their own work at the same time."""
        asked: dict[str, tuple[TrainGroup, tuple[str, ...]]] = {}
        if fields := self.recipe.old_outputs:
            asked["policy"] = self.policy, fields
        if self.reference is not None:
            asked["reference"] = self.reference, ("log_probs",)
        if self.critic is not None:
            asked["critic"] = self.critic, ("values",)

        def begin(role: str) -> Begun[ModelOutputs]:
            group, outputs = asked[role]
            return group.begin_score(batch, outputs)

        found = self._together(list(asked), begin)
        if (old := found.get("policy")) is not None:
            batch = batch.with_columns(**{f"old_{name}": _present(getattr(old, name)) for name in fields})
            if old.routed_experts is not None:  # routing replay: the update takes the same experts
                batch = batch.with_columns(routed_experts=old.routed_experts)
        if (reference := found.get("reference")) is not None:
            batch = batch.with_columns(ref_log_probs=_present(reference.log_probs))
        if (critic := found.get("critic")) is not None:
            batch = batch.with_columns(values=_present(critic.values))
        return batch

    def update(self, batch: Batch, step: int, trace: StepTrace | None = None) -> dict[str, list[StepReport]]:
        """All optimizer steps of one batch of samples; reports by role, which the trace has as they come.

        Critic and policy take their steps of a minibatch at once, unless they share devices.
        """
        trace = trace or StepTrace(step=step + 1, groups=())
        losses = {"critic": self.recipe.value_loss(), "policy": self.recipe.policy_loss(self.kl.value)}
        trained = {"critic": self.critic, "policy": self.policy if step >= self.plan.critic_warmup_steps else None}
        work = {
            role: (group, loss)
            for role, group in trained.items()
            if group is not None and (loss := losses[role]) is not None
        }
        if trace.order is None:
            trace.order = self.plan.order(batch["group_ids"].tolist(), step, ranks=self.policy.ranks)
        for rows in trace.order:
            minibatch = batch.select(rows)

            def begin(role: str, minibatch: Batch = minibatch) -> Begun[StepReport]:
                group, loss = work[role]
                return group.begin_step(minibatch, loss)

            for role, report in self._together(list(work), begin).items():
                trace.reports.setdefault(role, []).append(report)
        return trace.reports

    def _together(self, roles: Sequence[str], begin: Callable[[str], Begun[T]]) -> dict[str, T]:
        """Results of work of all roles, by role: at the same time, in turns where they share devices."""
        found: dict[str, T] = {}
        for turn in in_turns(roles, self.shared):
            found |= zip(turn, results_of([begin(role) for role in turn]), strict=True)
        return found

    def take_idle_seconds(self) -> dict[str, float]:
        """Seconds since the last call in which a role had nothing to do, by role."""
        groups = [self.policy, self.critic, self.reference, *self.rewards]
        # The reward of a part is called `reward <part>`.
        return {group.name.replace(" ", "/"): group.take_idle_seconds() for group in groups if group is not None}

    def memory(self) -> dict[str, float]:
        """GiB of the rank with most, by role: what it holds, and the peak of each phase; where the engine says."""
        return {
            f"memory/{group.name}/{what}": size / 2**30
            for group in self.trained
            for what, size in group.memory().items()
        }


def _kl_of(metrics: Mapping[str, Mean]) -> float:
    """KL to the reference per token, before the update; NaN (which controllers ignore) without a reference."""
    found = [metrics[name].value for name in ("kl", "reference_kl") if name in metrics]
    return found[0] if found else math.nan


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise RuntimeError("the engine did not return the outputs it was asked for")
    return tensor
