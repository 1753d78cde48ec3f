"""GRPO on the episodes of an agent, in one process: the loop that both examples share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlhf_algos import GRPO, TorchEngine
from rlhf_core import (
    Batch,
    EngineConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
    Trajectory,
    collate,
    open_sender,
    send_weights,
)
from rlhf_rollout import (
    AgentConfig,
    AgentLoop,
    AgentTask,
    EnvironmentReward,
    TransformersBackend,
    score_as_finished,
    tool_call_parser,
)
from torch import Tensor


def turn_advantages(scores: Tensor, group_ids: Tensor, batch: Batch, config: object) -> Tensor:
    """An advantage estimator that knows turns: what a turn and those after it earned, against the group's mean.

    The baseline of a turn is the mean over the group's episodes that came as far. Use it as
    `GRPO(advantage="agent_training:turn_advantages")`. Returns [rows, length].
    """
    mask, rewards = batch.response_mask, batch["rewards"]
    to_go = rewards.flip(1).cumsum(1).flip(1)
    # Turns are numbered from 1: a turn begins where the token before was not sampled.
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    turns = starts.cumsum(1) * mask
    advantages = torch.zeros_like(to_go)
    for group in group_ids.unique():
        rows = (group_ids == group).unsqueeze(1)
        for turn in range(1, int(turns.max()) + 1):
            place = rows & (turns == turn)
            if place.any():
                advantages[place] = to_go[place] - to_go[place & starts].mean()
    return advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTraining:
    """A task for an agent and how to train on it."""

    model: str
    """Directory with the model to start from."""
    tokenizer: Any
    agent: AgentConfig
    sampling: SamplingConfig
    """Of every turn."""
    max_tokens: int
    """Tokens of an episode."""
    recipe: GRPO
    optimizer: OptimizerConfig
    steps: int
    minibatches: int = 1
    """Optimizer steps on the episodes of a step."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step saw, before its update."""

    step: int
    trajectories: Sequence[Trajectory]
    reward: float
    """Mean over the episodes."""
    components: dict[str, float]
    """Means of what the environment logged."""
    log_prob_gap: float
    """Largest difference between the generator's log-prob of a token and the trainer's."""


async def train(
    training: AgentTraining,
    tasks_of: Callable[[int], Sequence[AgentTask]],
    report: Callable[[StepResult], None],
    *,
    export: Path | None = None,
) -> None:
    """Play the episodes of `tasks_of(step)`, score them, update, send the weights; `steps` times."""
    torch.manual_seed(training.seed)
    engine = TorchEngine(EngineConfig(model=training.model, optimizer=training.optimizer, seed=training.seed))
    backend = TransformersBackend(
        RolloutConfig(model=training.model, max_model_len=training.max_tokens, max_num_seqs=512)
    )
    loop = AgentLoop(
        backend,
        training.tokenizer,
        training.agent,
        sampling=training.sampling,
        max_tokens=training.max_tokens,
        parse_tool_calls=tool_call_parser(training.tokenizer),
    )
    sender = open_sender("local", receivers=1)
    try:
        await asyncio.gather(asyncio.to_thread(sender.accept), backend.connect(sender.link, 0))
        for step in range(training.steps):
            result, trajectories, scores = await play(loop, training.tokenizer, tasks_of(step), step)
            report(update(engine, training, trajectories, scores, result))
            manifest = engine.weights().manifest(step + 1)
            await asyncio.gather(
                backend.receive_weights(manifest),
                asyncio.to_thread(send_weights, engine.weights(), manifest, sender),
            )
        if export is not None:
            export.mkdir(parents=True, exist_ok=True)
            engine.export(export)
            training.tokenizer.save_pretrained(export)
    finally:
        sender.close()
        backend.close()
        engine.close()


async def play(
    loop: AgentLoop, tokenizer: Any, tasks: Sequence[AgentTask], step: int
) -> tuple[StepResult, list[Trajectory], list[float]]:
    """All episodes of a step, each group scored as soon as it is over."""

    def decode(trajectories: Sequence[Trajectory]) -> list[str]:
        rows = [t.response_token_ids.tolist() for t in trajectories]
        return tokenizer.batch_decode(rows, skip_special_tokens=True)

    groups = [loop.run_group(task) for task in tasks]
    finished = dict([scored async for scored in score_as_finished(groups, EnvironmentReward(), decode)])
    in_order = [finished[place] for place in range(len(tasks))]
    trajectories = [t for group in in_order for t in group.trajectories]
    scores = [score for group in in_order for score in group.scores]
    names = sorted({name for score in scores for name in score.components})
    result = StepResult(
        step=step,
        trajectories=trajectories,
        reward=sum(score.value for score in scores) / len(scores),
        components={name: sum(s.components.get(name, 0.0) for s in scores) / len(scores) for name in names},
        log_prob_gap=0.0,
    )
    return result, trajectories, [score.value for score in scores]


def update(
    engine: TorchEngine,
    training: AgentTraining,
    trajectories: list[Trajectory],
    scores: list[float],
    seen: StepResult,
) -> StepResult:
    """The optimizer steps; the result with the gap between generator and trainer filled in."""
    recipe = training.recipe
    batch = collate(trajectories)
    old = engine.score(batch, ("log_probs",)).log_probs
    gap = (old - batch["rollout_log_probs"]).abs().masked_fill(~batch.response_mask, 0).max()
    numbers: dict[str, int] = {}
    groups = torch.tensor([numbers.setdefault(t.group_id, len(numbers)) for t in trajectories])
    batch, _ = recipe.prepare(batch.with_columns(old_log_probs=old), torch.tensor(scores), groups, kl_coef=0.0)
    order = torch.randperm(batch.rows).tolist()
    for part in range(training.minibatches):
        engine.step(batch.select(order[part :: training.minibatches]), recipe.policy_loss())
    return StepResult(
        step=seen.step,
        trajectories=seen.trajectories,
        reward=seen.reward,
        components=seen.components,
        log_prob_gap=float(gap),
    )
