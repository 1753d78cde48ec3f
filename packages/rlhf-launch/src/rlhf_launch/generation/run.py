"""Samples for a file of prompts: generate, score where asked for, write; go on after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rlhf_algos import naming_full_disk
from rlhf_core import GenerationRequest, Score, check_model_path, check_scores

from rlhf_launch.config.generate import GenerateConfig
from rlhf_launch.config.paths import absolute
from rlhf_launch.config.placement import REWARD
from rlhf_launch.generation.lanes import in_lanes
from rlhf_launch.generation.rows import GeneratedRows, make_row
from rlhf_launch.placement.plans import reward_plans, rollout_plans
from rlhf_launch.placement.resolve import ResolvedBackends, resolve_backends
from rlhf_launch.placement.start import executor_of, start_workers
from rlhf_launch.samples.prompts import Prompt, PromptFormat, PromptSets, load_prompts, policy_tokenizer
from rlhf_launch.samples.reward import CheckedReward, Rewarder, check_reward, open_reward
from rlhf_launch.samples.sampling import trajectories_of
from rlhf_launch.seeds import request_seed
from rlhf_launch.workers.devices import SharedDevices
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.waits import Waits


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationReport:
    """What one call did."""

    prompts: int
    """In the data."""
    written: int
    found: int
    """Rows that an earlier call had written."""
    tokens: int
    """Sampled by this call."""
    mean_score: float | None


def generate(config: GenerateConfig, *, console: Console | None = None) -> GenerationReport:
    """Generate what is still missing in the output file.

    Raises:
        UserError: an input is at fault; nothing heavy was started.
        ResourceError: the disk is full, or the output cannot be written.
        RewardError: the reward function failed; finished rows are in the file, the next call goes on from there.
    """
    with naming_full_disk(config.output.parent):
        return _generate(absolute(config), console or Console(highlight=False))


def check_generation(config: GenerateConfig) -> PromptSets:
    """Read and check all that a call of `generate` would need, without its engines; returns the prompts.

    Raises:
        UserError: an input is at fault.
    """
    with _checked_inputs(absolute(config)) as inputs:
        return inputs.loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """What is known before anything heavy is started."""

    backends: ResolvedBackends
    tokenizer: Any
    loaded: PromptSets
    reward: CheckedReward | None


@contextmanager
def _checked_inputs(config: GenerateConfig) -> Iterator[_Inputs]:
    backends = resolve_backends(config, trains=False)
    check_model_path(config.model.path, what="model.path")
    tokenizer = policy_tokenizer(config.model)
    loaded = load_prompts(config.data.train, tokenizer, PromptFormat.of(config.data, config.lengths))
    with ExitStack() as stack:
        checked = None
        if config.reward is not None:
            trusted = config.model.trust_remote_code
            checked = check_reward(config.reward, tokenizer, environment=False, trust_remote_code=trusted)
            stack.callback(checked.close)
            checked.check_columns(loaded.prompts, config.data.description, environment=False)
        yield _Inputs(backends=backends, tokenizer=tokenizer, loaded=loaded, reward=checked)


def _generate(config: GenerateConfig, console: Console) -> GenerationReport:
    with ExitStack() as stack:
        inputs = stack.enter_context(_checked_inputs(config))
        tokenizer, prompts, dropped = inputs.tokenizer, inputs.loaded.prompts, inputs.loaded.dropped
        rows = stack.enter_context(GeneratedRows(config.output, config.settings()))
        pending = rows.pending(prompts)
        if rows.done:
            console.print(f"{len(prompts) - len(pending)} of {len(prompts)} prompts are done already")
        if dropped:
            console.print(f"{dropped} overlong prompts dropped")
        total = len(prompts)
        if not pending:
            return GenerationReport(prompts=total, written=0, found=total, tokens=0, mean_score=None)
        pool, rewarder = stack.enter_context(_start(config, inputs.backends, inputs.reward, tokenizer, console))
        progress = stack.enter_context(Progress(console=console, transient=True))
        bar = progress.add_task("prompts", total=len(prompts), completed=len(prompts) - len(pending))
        work = _Work(config, pool, tokenizer, rewarder, rows, advance=lambda: progress.advance(bar))
        stack.enter_context(pool.generating())
        pool.waits.run(work.run(pending), what=lambda: f"the samples of {len(pending) - work.done} prompts")
    return GenerationReport(
        prompts=len(prompts),
        written=len(pending),
        found=len(prompts) - len(pending),
        tokens=work.tokens,
        mean_score=sum(work.scores) / len(work.scores) if work.scores else None,
    )


@contextmanager
def _start(
    config: GenerateConfig,
    backends: ResolvedBackends,
    checked: CheckedReward | None,
    tokenizer: Any,
    console: Console,
) -> Iterator[tuple[RolloutPool, Rewarder | None]]:
    """The rollout engines, and the reward with its models."""
    waits = Waits(config.placement.timeout_s)
    executor = executor_of(config, backends)
    training = {f"{REWARD}{name}": plans for name, plans in reward_plans(config, backends).items()}
    rollout = rollout_plans(config, backends)
    with (
        ExitStack() as stack,
        start_workers(
            executor,
            training,
            rollout,
            waits=waits,
            devices=SharedDevices(config.shared),
            say=console.print,
        ) as workers,
    ):
        rewarder = None
        if checked is not None:
            reward, close = open_reward(checked, workers.training, tokenizer)
            stack.callback(close)
            rewarder = Rewarder(reward, tokenizer)
        yield workers.pool, rewarder


class _Work:
    """Generates and scores many prompts at once, each scored as soon as its samples are there."""

    def __init__(
        self,
        config: GenerateConfig,
        pool: RolloutPool,
        tokenizer: Any,
        rewarder: Rewarder | None,
        rows: GeneratedRows,
        *,
        advance: Any,
    ) -> None:
        self._config, self._pool, self._tokenizer, self._rewarder = config, pool, tokenizer, rewarder
        self._rows, self._advance = rows, advance
        self.done = 0
        self.tokens = 0
        self.scores: list[float] = []

    async def run(self, prompts: list[Prompt]) -> None:
        """All prompts, with twice as many samples under way as the engines run at a time: they never wait."""
        rollout = self._config.rollout
        lanes = max(1, 2 * rollout.engines * rollout.max_num_seqs // rollout.samples_per_prompt)
        await in_lanes(prompts, self._one, lanes=lanes)

    async def _one(self, prompt: Prompt) -> None:
        config = self._config
        label = f"generate/{prompt.prompt_id}"
        request = GenerationRequest(
            request_id=label,
            prompt_token_ids=prompt.token_ids,
            sampling=config.rollout.sampling,
            n=config.rollout.samples_per_prompt,
            # By the prompt alone: a run that was interrupted draws the same samples as one that was not.
            seed=request_seed(config.seed, label),
        )
        result = await self._pool.generate(request)
        texts = self._tokenizer.batch_decode(
            [s.token_ids.tolist() for s in result.samples], skip_special_tokens=True
        )
        scores = None
        if self._rewarder is not None:
            trajectories = [
                replace(trajectory, sample_id=f"{prompt.prompt_id}/{index}")
                for index, trajectory in enumerate(trajectories_of(prompt, result))
            ]
            scores = await self._rewarder.reward.score(trajectories, texts)
            check_scores(scores, trajectories, source="of rlhf generate")
            self.scores.extend(score.value for score in scores if isinstance(score, Score))
        self.tokens += sum(sample.length for sample in result.samples)
        self._rows.append(make_row(prompt, result, texts, scores))
        self.done += 1
        self._advance()
