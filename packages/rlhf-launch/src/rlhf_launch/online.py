"""The online loop: sample, score, estimate advantages, train, send the new weights, again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rlhf_algos.kl import KLController
from rlhf_algos.recipes import Recipe
from rlhf_core import Batch, Mean, Score, StepReport, Trajectory, collate

from rlhf_launch.collecting import collect
from rlhf_launch.config import RunConfig
from rlhf_launch.engine_replacement import EngineReplacement
from rlhf_launch.evaluation import HeldOut, evaluate
from rlhf_launch.prompts import PromptStream
from rlhf_launch.report import PhaseClock, Reporter, sample_metrics, step_metrics
from rlhf_launch.rewarding import Rewarder
from rlhf_launch.rollout_pool import RolloutPool
from rlhf_launch.run_state import RunState
from rlhf_launch.train_group import TrainGroup
from rlhf_launch.weight_sync import WeightSync


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The workers of a run."""

    policy: TrainGroup
    critic: TrainGroup | None
    reference: TrainGroup | None
    pool: RolloutPool
    sync: WeightSync
    replacement: EngineReplacement
    rewarder: Rewarder


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineRun:
    """Everything the loop uses."""

    config: RunConfig
    recipe: Recipe
    roles: Roles
    prompts: PromptStream
    held_out: Mapping[str, HeldOut]
    kl: KLController
    reporter: Reporter
    state: RunState


def train(run: OnlineRun) -> None:
    """Run the steps that are left."""
    config, roles, recipe = run.config, run.roles, run.recipe
    for step in range(run.state.step, config.steps):
        clock = PhaseClock()
        collected = collect(run, step)
        trajectories, scores = collected.trajectories, collected.scores
        clock.add(collected.seconds)
        if roles.pool.lost:
            with clock("replacement"):
                roles.replacement()
        with clock("score"):
            batch = add_model_outputs(collate(trajectories), roles)
            batch = batch.with_columns(truncated=torch.tensor([t.truncated for t in trajectories]))
        batch, metrics = recipe.prepare(batch, _values(scores), group_index(trajectories), kl_coef=run.kl.value)
        with clock("train"):
            reports = update(run, batch, train_policy=step >= config.train.critic_warmup_steps)
        with clock("sync"):
            sync = roles.sync(step + 1)
        run.kl.update(_kl_of(metrics), batch.rows)
        run.state.step, run.state.surplus = step + 1, collected.surplus
        run.reporter.step(
            step + 1,
            sample_metrics(trajectories, scores, batch)
            | collected.counts
            | {name: mean.value for name, mean in metrics.items()}
            | step_metrics(reports)
            | clock.metrics(batch)
            | {"weight_version": sync.version, "kl_coef": run.kl.value},
        )
        if _due(step + 1, config.eval_every) and step + 1 < config.steps:
            report_evaluations(run)
        if _due(step + 1, config.checkpoint_every) or step + 1 == config.steps:
            run.state.save(run)


def add_model_outputs(batch: Batch, roles: Roles) -> Batch:
    """Add old_log_probs (policy before the update), and ref_log_probs and values where there is such a role."""
    old = roles.policy.score(batch, ("log_probs",))
    batch = batch.with_columns(old_log_probs=_present(old.log_probs))
    if roles.reference is not None:
        reference = roles.reference.score(batch, ("log_probs",))
        batch = batch.with_columns(ref_log_probs=_present(reference.log_probs))
    if roles.critic is not None:
        batch = batch.with_columns(values=_present(roles.critic.score(batch, ("values",)).values))
    return batch


def update(run: OnlineRun, batch: Batch, *, train_policy: bool) -> dict[str, list[StepReport]]:
    """All optimizer steps of one batch of samples; reports by role."""
    train, roles = run.config.train, run.roles
    policy_loss, value_loss = run.recipe.policy_loss(run.kl.value), run.recipe.value_loss()
    reports: dict[str, list[StepReport]] = {}
    for epoch in range(train.epochs):
        generator = torch.Generator().manual_seed(run.config.seed * 1_000_003 + run.state.step * 101 + epoch)
        order = torch.randperm(batch.rows, generator=generator).tolist()
        # A step that dynamic sampling left short has fewer minibatches, so that every rank has a row in each.
        parts = max(1, min(train.minibatches, batch.rows // train.ranks))
        for part in range(parts):
            minibatch = batch.select(order[part::parts])
            if roles.critic is not None and value_loss is not None:
                reports.setdefault("critic", []).append(roles.critic.step(minibatch, value_loss))
            if train_policy:
                reports.setdefault("policy", []).append(roles.policy.step(minibatch, policy_loss))
    return reports


def report_evaluations(run: OnlineRun) -> None:
    """Evaluate every held-out set and report it."""
    for evaluation in evaluate(run):
        run.reporter.evaluation(evaluation)


def group_index(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """[rows] Samples of one prompt share a number."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(t.group_id, len(numbers)) for t in trajectories])


def _values(scores: Sequence[Score]) -> torch.Tensor:
    return torch.tensor([score.value for score in scores], dtype=torch.float32)


def _kl_of(metrics: Mapping[str, Mean]) -> float:
    """KL to the reference per token, before the update; NaN (which controllers ignore) without a reference."""
    found = [metrics[name].value for name in ("kl", "reference_kl") if name in metrics]
    return found[0] if found else math.nan


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise RuntimeError("the engine did not return the outputs it was asked for")
    return tensor


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
