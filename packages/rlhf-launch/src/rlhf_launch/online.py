"""The online loop: sample, score, estimate advantages, train, send the new weights, again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from rlhf_algos.kl import KLController
from rlhf_algos.recipes import Recipe
from rlhf_core import Batch, Mean, Score, StepReport, Trajectory, collate

from rlhf_launch.config import RunConfig
from rlhf_launch.prompts import Prompt, PromptStream
from rlhf_launch.report import Evaluation, PhaseClock, Reporter, sample_metrics, step_metrics
from rlhf_launch.rewarding import Rewarder
from rlhf_launch.rollout_pool import RolloutPool
from rlhf_launch.run_state import RunState
from rlhf_launch.sampling_step import generate
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
    rewarder: Rewarder


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineRun:
    """Everything the loop uses."""

    config: RunConfig
    recipe: Recipe
    roles: Roles
    prompts: PromptStream
    held_out: Sequence[Prompt]
    kl: KLController
    reporter: Reporter
    state: RunState


def train(run: OnlineRun) -> None:
    """Run the steps that are left."""
    config, roles, recipe = run.config, run.roles, run.recipe
    for step in range(run.state.step, config.steps):
        clock = PhaseClock()
        with clock("rollout"):
            prompts = run.prompts.take(config.train.prompts_per_step)
            trajectories = sample(run, prompts, label=str(step))
        with clock("reward"):
            scores = roles.rewarder.score(trajectories)
        with clock("score"):
            batch = add_model_outputs(collate(trajectories), roles)
            batch = batch.with_columns(truncated=torch.tensor([t.truncated for t in trajectories]))
        batch, metrics = recipe.prepare(batch, _values(scores), group_index(trajectories), kl_coef=run.kl.value)
        with clock("train"):
            reports = update(run, batch, train_policy=step >= config.train.critic_warmup_steps)
        with clock("sync"):
            sync = roles.sync(step + 1)
        run.kl.update(_kl_of(metrics), batch.rows)
        run.state.step = step + 1
        run.reporter.step(
            step + 1,
            sample_metrics(trajectories, scores, batch)
            | {name: mean.value for name, mean in metrics.items()}
            | step_metrics(reports)
            | clock.metrics(batch)
            | {"weight_version": sync.version, "kl_coef": run.kl.value},
        )
        if _due(step + 1, config.eval_every) and step + 1 < config.steps:
            run.reporter.evaluation(evaluate(run))
        if _due(step + 1, config.checkpoint_every) or step + 1 == config.steps:
            run.state.save(run)


def sample(run: OnlineRun, prompts: Sequence[Prompt], *, label: str) -> list[Trajectory]:
    """The training samples of one step."""
    config = run.config
    return generate(
        run.roles.pool,
        prompts,
        config.rollout.sampling,
        label=label,
        samples=config.rollout.samples_per_prompt,
        seed=config.seed,
        timeout_s=config.placement.timeout_s,
    )


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
        for part in range(train.minibatches):
            minibatch = batch.select(order[part :: train.minibatches])
            if roles.critic is not None and value_loss is not None:
                reports.setdefault("critic", []).append(roles.critic.step(minibatch, value_loss))
            if train_policy:
                reports.setdefault("policy", []).append(roles.policy.step(minibatch, policy_loss))
    return reports


def evaluate(run: OnlineRun) -> Evaluation:
    """Score one sample of every held-out prompt; does not touch the training stream."""
    config = run.config
    trajectories = generate(
        run.roles.pool,
        run.held_out,
        replace(config.rollout.sampling, temperature=config.rollout.eval_temperature),
        label=f"eval-{run.state.step}",
        samples=1,
        seed=config.seed,
        timeout_s=config.placement.timeout_s,
    )
    scores = run.roles.rewarder.score(trajectories)
    return Evaluation(step=run.state.step, trajectories=trajectories, scores=scores)


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
