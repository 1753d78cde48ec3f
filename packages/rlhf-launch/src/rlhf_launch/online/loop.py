"""The online loop: sample, score, estimate advantages, train, send the new weights, again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rlhf_algos import KLController, Recipe
from rlhf_core import Batch, Mean, Score, StepReport, collate

from rlhf_launch.config.run import RunConfig
from rlhf_launch.online.evaluation import HeldOut, evaluate
from rlhf_launch.online.report import PhaseClock, Reporter, sample_metrics, step_metrics
from rlhf_launch.online.state import RunState
from rlhf_launch.samples.collecting import StepSamples
from rlhf_launch.samples.groups import group_index
from rlhf_launch.samples.producer import Producer
from rlhf_launch.samples.prompts import PromptStream
from rlhf_launch.samples.reward import Rewarder
from rlhf_launch.weight_sync.replacement import RolloutReplacement
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The workers of a run."""

    policy: TrainGroup
    critic: TrainGroup | None
    reference: TrainGroup | None
    pool: RolloutPool
    sync: WeightSync
    replacement: RolloutReplacement
    rewarder: Rewarder


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineRun:
    """Everything the loop uses."""

    config: RunConfig
    recipe: Recipe
    roles: Roles
    prompts: PromptStream
    producer: Producer
    held_out: Mapping[str, HeldOut]
    kl: KLController
    reporter: Reporter
    state: RunState


def train(run: OnlineRun) -> None:
    """Run the steps that are left."""
    config, roles = run.config, run.roles
    for step in range(run.state.step, config.steps):
        clock = PhaseClock()
        collected = run.producer.collect()
        clock.add(collected.seconds)
        if roles.pool.lost:
            with clock("replacement"):
                roles.replacement()
        with roles.replacement.held_off():
            run.producer.hold()
            batch, metrics = train_on(run, collected, step, clock)
            with clock("sync"):
                sync = roles.replacement.sync(step + 1)
            run.producer.go_on(step + 1)
        run.state.step = step + 1
        timing = clock.metrics(batch, overlapping=config.rollout.overlap is not None)
        timing["idle_seconds/trainer"] = sum(collected.seconds.values())
        timing["idle_seconds/engines"] = roles.pool.idle.take()
        run.reporter.step(step + 1, metrics | collected.counts | timing | {"weight_version": sync.version})
        last = step + 1 == config.steps
        if last or _due(step + 1, config.eval_every):
            report_evaluations(run)
        with roles.replacement.held_off():
            if last or _due(step + 1, config.checkpoint_every):
                run.state.save(run)
            run.state.publish(run, wait=last)


def train_on(
    run: OnlineRun, collected: StepSamples, step: int, clock: PhaseClock
) -> tuple[Batch, dict[str, float]]:
    """Score, estimate advantages and take the optimizer steps of one batch of samples."""
    trajectories, scores = collected.trajectories, collected.scores
    with clock("score"):
        batch = add_model_outputs(collate(trajectories), run.roles)
        batch = batch.with_columns(truncated=torch.tensor([t.truncated for t in trajectories]))
    batch, prepared = run.recipe.prepare(batch, _values(scores), group_index(trajectories), kl_coef=run.kl.value)
    with clock("train"):
        reports = update(run, batch, train_policy=step >= run.config.train.critic_warmup_steps)
    kl_coef = run.kl.value
    run.kl.update(_kl_of(prepared), batch.rows)
    metrics = (
        sample_metrics(trajectories, scores, batch)
        | collected.staleness(step)
        | {name: mean.value for name, mean in prepared.items()}
        | step_metrics(reports)
        | memory_metrics(run.roles)
        | {"kl_coef": kl_coef}
    )
    return batch, metrics


def add_model_outputs(batch: Batch, roles: Roles) -> Batch:
    """Add old_log_probs (policy before the update), and ref_log_probs and values where there is such a role."""
    old = roles.policy.score(batch, ("log_probs",))
    batch = batch.with_columns(old_log_probs=_present(old.log_probs))
    if old.routed_experts is not None:  # routing replay: the update takes the same experts
        batch = batch.with_columns(routed_experts=old.routed_experts)
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


def memory_metrics(roles: Roles) -> dict[str, float]:
    """GiB of the rank with most, by role: what it holds and the peak of each phase; where the engine says."""
    trained = [roles.policy, *([roles.critic] if roles.critic is not None else [])]
    return {
        f"memory/{group.name}/{what}": size / 2**30 for group in trained for what, size in group.memory().items()
    }


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
