"""`rlhf doctor mismatch`: generate with a run's backend, score with its trainer, attribute the difference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rlhf_algos import absolute_path
from rlhf_core import (
    ConfigError,
    DroppedSample,
    SamplingConfig,
    Trajectory,
    check_model_path,
    collate,
)
from torch import Tensor

from rlhf_launch.config.paths import absolute
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.mismatch.attribution import Diagnosis, Gap, Scored, check_tokens, diagnose, readings
from rlhf_launch.online.preflight import Inputs, check_inputs
from rlhf_launch.placement.plans import rollout_plans, training_plans
from rlhf_launch.placement.start import executor_of, start_workers
from rlhf_launch.samples.sampling import GroupSampler, response_sampler
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.waits import Waits


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchReport:
    """The diagnosis, and the gap after the trainer's weights were sent to the sampler, where that was possible."""

    diagnosis: Diagnosis
    after_sync: Gap | None
    samples: int
    sampler_model: str


def check_mismatch(
    config: OnlineConfig, *, prompts: int = 8, sampler_model: str | None = None, console: Console | None = None
) -> MismatchReport:
    """Compare the log-probs of sampler and trainer, find where a difference comes from, and print the numbers.

    Args:
        config: a run, whose own sampling settings are used.
        prompts: how many of its prompts, from the first on.
        sampler_model: what the rollout engine loads, if that is not the policy's model: an older checkpoint, say,
            or an export whose weights are in doubt.
        console: where the numbers go; standard output if not given.

    Raises:
        UserError: the input is at fault; nothing heavy was started.
    """
    console = console or Console(highlight=False)
    if prompts < 1:
        raise ConfigError(f"the check needs at least 1 prompt, got {prompts}")
    config = absolute(config)
    inputs = check_inputs(config)
    inputs.reward.close()  # nothing is scored here
    if sampler_model is not None:
        check_model_path(sampler_model, what="--sampler-model")
    sampler_model = absolute_path(sampler_model or config.model.path)
    # Tokens whose end-of-text was held back, or that were penalised, have log-probs of yet another distribution.
    sampling = replace(
        config.rollout.sampling, min_tokens=0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
    )
    with _start(config, inputs, sampler_model) as (group, pool, sync):
        sample = response_sampler(pool, sampling, seed=config.request_seed)
        trajectories = _sample(config, inputs, sample, pool, label="doctor", prompts=prompts)
        scored = _score(config, inputs, group, sampling, trajectories)
        after = None
        if sync is not None:
            sync(1)
            again = _sample(config, inputs, sample, pool, label="doctor after sync", prompts=prompts)
            after = Gap.between(_sampled(again), _trainer_log_probs(group, again))
    versions = {version for t in trajectories for version in t.weight_versions if version >= 0}
    diagnosis = diagnose(
        scored,
        weights=_weights_detail(versions, after),
        versions_differ=bool(versions - {0}),
        tokens=check_tokens(inputs.tokenizer, trajectories, _trained_tokens(trajectories)),
    )
    report = MismatchReport(
        diagnosis=diagnosis, after_sync=after, samples=len(trajectories), sampler_model=sampler_model
    )
    print_report(report, console)
    return report


@contextmanager
def _start(
    config: OnlineConfig, inputs: Inputs, sampler_model: str
) -> Iterator[tuple[TrainGroup, RolloutPool, WeightSync | None]]:
    backends, waits = inputs.backends, Waits(config.placement.timeout_s)
    sampler = replace(config, model=replace(config.model, path=sampler_model))
    executor = executor_of(config, backends)
    training = {"policy": training_plans(config, backends, "policy")}
    rollout = rollout_plans(sampler, backends)
    with start_workers(executor, training, rollout, waits=waits) as workers:
        policy, pool = workers.training["policy"], workers.pool
        try:
            # The gap is what is asked for here, so it may be as large as it is.
            options = WeightSyncSection(probe_every=0)
            sync = WeightSync(policy, pool, transports=executor.transports, options=options)
        except ConfigError:  # a backend that takes no weights, such as a remote server
            sync = None
        yield policy, pool, sync


def _sample(
    config: OnlineConfig, inputs: Inputs, sample: GroupSampler, pool: RolloutPool, *, label: str, prompts: int
) -> list[Trajectory]:
    """Samples of the first prompts, without those that have no token."""
    samples = config.rollout.samples_per_prompt

    async def everything() -> list[list[Trajectory | DroppedSample]]:
        chosen = inputs.prompts.prompts[:prompts]
        work = [sample(prompt, f"{label}/{index}", samples) for index, prompt in enumerate(chosen)]
        return await asyncio.gather(*work)

    groups = pool.waits.run(everything(), what=f"{samples} samples each of {prompts} prompts")
    drawn = [sample for group in groups for sample in group if isinstance(sample, Trajectory)]
    return [trajectory for trajectory in drawn if trajectory.response_length]


def _score(
    config: OnlineConfig,
    inputs: Inputs,
    group: TrainGroup,
    sampling: SamplingConfig,
    trajectories: Sequence[Trajectory],
) -> Scored:
    dtype, trust = inputs.backends.dtype, config.model.trust_remote_code
    logits = {False: forward_of(config.model.path, "float32", trust=trust)}
    if dtype != "float32":
        logits[True] = forward_of(config.model.path, dtype, trust=trust)
    return Scored(
        sampler=_sampled(trajectories),
        trainer=_trainer_log_probs(group, trajectories),
        readings=readings(trajectories, sampling, logits),
    )


def forward_of(model: str, dtype: str, *, trust: bool = False) -> Callable[[Trajectory], Tensor]:
    """Plain forward passes of a model by Transformers: trajectory -> logits [length, vocab]."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), trust_remote_code=trust
    ).eval()

    @torch.inference_mode()
    def logits(trajectory: Trajectory) -> Tensor:
        return loaded(torch.tensor([trajectory.token_ids]), use_cache=False).logits[0]

    return logits


def _sampled(trajectories: Sequence[Trajectory]) -> Tensor:
    batch = collate(trajectories)
    return batch["rollout_log_probs"][batch.response_mask]


def _trainer_log_probs(group: TrainGroup, trajectories: Sequence[Trajectory]) -> Tensor:
    batch = collate(trajectories)
    log_probs = group.score(batch, ("log_probs",)).log_probs
    if log_probs is None:
        raise TypeError("the training engine gave no log_probs")
    return log_probs[batch.response_mask].float()


def _trained_tokens(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """The rows of the batch that the trainer gets, without padding."""
    batch = collate(trajectories)
    return [row[mask].tolist() for row, mask in zip(batch.token_ids, batch.attention_mask, strict=True)]


def _weights_detail(versions: set[int], after: Gap | None) -> str:
    said = f"sampled by version {', '.join(map(str, sorted(versions)))}; the trainer is at 0"
    if after is not None:
        said += f". After a sync the gap is {after.mean:.1e} on average, {after.largest:.1e} at most"
    return said


def print_report(report: MismatchReport, console: Console) -> None:
    """The numbers as tables."""
    diagnosis = report.diagnosis
    gaps = Table(
        title=f"log-probs of {diagnosis.gap.tokens} tokens in {report.samples} samples",
        title_justify="left",
        box=None,
    )
    for column in ("difference between", "mean", "largest"):
        gaps.add_column(column, justify="left" if column.startswith("diff") else "right")
    rows = {
        "sampler and trainer": diagnosis.gap,
        "trainer and a float32 forward pass": diagnosis.trainer_error,
        "sampler and its best explanation": diagnosis.unexplained,
        "sampler and trainer after a weight sync": report.after_sync,
    }
    for name, gap in rows.items():
        if gap is not None:
            gaps.add_row(name, f"{gap.mean:.2e}", f"{gap.largest:.2e}")
    console.print(gaps)
    causes = Table(title="causes", title_justify="left", box=None)
    for column in ("cause", "found", "evidence"):
        causes.add_column(column)
    for finding in diagnosis.findings:
        causes.add_row(finding.cause, "yes" if finding.found else "no", finding.detail)
    console.print(causes)
