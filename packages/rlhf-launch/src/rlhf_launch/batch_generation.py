"""Samples for a file of prompts: generate, score where asked for, write; go on after an interruption."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rlhf_algos.data import DataSource, read_rows
from rlhf_algos.torch_models import check_model_path
from rlhf_core import ConfigError, DeadlineExceeded, GenerationRequest, RewardFunction, Score, check_scores
from rlhf_rollout import PythonReward

from rlhf_launch.components import choose_components
from rlhf_launch.config import (
    AlgorithmSection,
    DataSection,
    ModelSection,
    PlacementSection,
    RewardSection,
    RolloutSection,
    RunConfig,
)
from rlhf_launch.generated_rows import GeneratedRows, make_row
from rlhf_launch.placement import open_executor, rollout_plans
from rlhf_launch.preflight import load_tokenizer
from rlhf_launch.prompts import Prompt, make_prompts
from rlhf_launch.rollout_pool import RolloutPool
from rlhf_launch.sampling_step import request_seed, trajectories_of


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """What `rlhf generate` reads. A file for `rlhf train` will do: what generation does not need is left out."""

    model: ModelSection
    data: DataSection
    output: str
    """JSONL file to write, or to complete."""
    reward: RewardSection | None = None
    """Scores the samples by its `function`; without it they are not scored."""
    rollout: RolloutSection = field(default_factory=lambda: RolloutSection(samples_per_prompt=1))
    placement: PlacementSection = field(default_factory=lambda: PlacementSection(executor="local"))
    seed: int = 0

    def as_run(self) -> RunConfig:
        """The same as a run, which is what placement reads; its training parts play no role."""
        return RunConfig(
            model=self.model,
            data=self.data,
            reward=self.reward or RewardSection(function="rlhf_rollout:exact_match"),
            algorithm=AlgorithmSection(name="ppo"),
            rollout=self.rollout,
            placement=self.placement,
            seed=self.seed,
        )

    def settings(self) -> dict[str, Any]:
        """What decides the content of the output."""
        return {
            "model": self.model.policy,
            "dtype": self.model.dtype,
            "prompts": self.data.prompts,
            "chat": self.data.chat,
            "system_prompt": self.data.system_prompt,
            "backend": self.rollout.backend,
            "samples_per_prompt": self.rollout.samples_per_prompt,
            "reward": self.reward.function if self.reward else None,
            "seed": self.seed,
            **{f"sampling.{name}": value for name, value in asdict(self.rollout.sampling).items()},
        }


NOT_FOR_GENERATION = frozenset(f.name for f in fields(RunConfig)) - {f.name for f in fields(GenerateConfig)}
"""Keys of a training configuration that generation passes over."""


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


def run_generation(config: GenerateConfig, *, console: Console | None = None) -> GenerationReport:
    """Generate what is still missing in the output file.

    Raises:
        UserError: an input is at fault; nothing heavy was started.
        RewardError: the reward function failed; finished rows are in the file, the next call goes on from there.
    """
    console = console or Console(highlight=False)
    run = config.as_run()
    components = choose_components(run)
    check_model_path(config.model.policy, what="model.policy")
    reward = _reward(config)
    tokenizer = load_tokenizer(config.model.policy, trust_remote_code=config.model.trust_remote_code)
    data = config.data
    source = DataSource(path=data.prompts, split=data.split, columns=data.columns, limit=data.limit)
    prompts, dropped = make_prompts(read_rows(source, required=("prompt",)), tokenizer, data)
    with ExitStack() as stack:
        rows = stack.enter_context(GeneratedRows(Path(config.output), config.settings()))
        pending = rows.pending(prompts)
        if rows.done:
            console.print(f"{len(prompts) - len(pending)} of {len(prompts)} prompts are done already")
        if dropped:
            console.print(f"{dropped} overlong prompts dropped")
        total = len(prompts)
        if not pending:
            return GenerationReport(prompts=total, written=0, found=total, tokens=0, mean_score=None)
        executor = open_executor(run, components)
        stack.callback(executor.close)
        handles = executor.place(rollout_plans(run, components))
        for handle in handles:
            stack.callback(handle.close)
        pool = RolloutPool(handles, timeout_s=config.placement.timeout_s)
        console.print(f"{components.backend}: {pool.engines} engine(s), up after {pool.start():.1f} s")
        progress = stack.enter_context(Progress(console=console, transient=True))
        bar = progress.add_task("prompts", total=len(prompts), completed=len(prompts) - len(pending))
        work = _Work(config, pool, tokenizer, reward, rows, advance=lambda: progress.advance(bar))
        asyncio.run(work.run(pending))
    return GenerationReport(
        prompts=len(prompts),
        written=len(pending),
        found=len(prompts) - len(pending),
        tokens=work.tokens,
        mean_score=sum(work.scores) / len(work.scores) if work.scores else None,
    )


def _reward(config: GenerateConfig) -> RewardFunction | None:
    if config.reward is None:
        return None
    if config.reward.function is None:
        raise ConfigError("rlhf generate scores by a function: give reward.function, or leave reward out")
    return PythonReward(config.reward.function, timeout_s=config.reward.timeout_s)


class _Work:
    """Generates and scores many prompts at once, each scored as soon as its samples are there."""

    def __init__(
        self,
        config: GenerateConfig,
        pool: RolloutPool,
        tokenizer: Any,
        reward: RewardFunction | None,
        rows: GeneratedRows,
        *,
        advance: Any,
    ) -> None:
        self._config, self._pool, self._tokenizer, self._reward = config, pool, tokenizer, reward
        self._rows, self._advance = rows, advance
        self.tokens = 0
        self.scores: list[float] = []

    async def run(self, prompts: list[Prompt]) -> None:
        """All prompts, with twice as many samples under way as the engines run at a time: they never wait."""
        rollout = self._config.rollout
        lanes = max(1, 2 * rollout.engines * rollout.max_num_seqs // rollout.samples_per_prompt)
        waiting = iter(prompts)
        tasks = [asyncio.ensure_future(self._lane(waiting)) for _ in range(min(lanes, len(prompts)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _lane(self, waiting: Iterator[Prompt]) -> None:
        for prompt in waiting:
            await self._one(prompt)
            self._advance()

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
        try:
            result = await asyncio.wait_for(self._pool.generate(request), config.placement.timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"waited {config.placement.timeout_s:g} s for the samples of prompt {prompt.prompt_id}; raise "
                "placement.timeout_s"
            ) from None
        texts = self._tokenizer.batch_decode([list(s.token_ids) for s in result.samples], skip_special_tokens=True)
        scores = None
        if self._reward is not None:
            trajectories = [
                replace(trajectory, sample_id=f"{prompt.prompt_id}/{index}")
                for index, trajectory in enumerate(trajectories_of(prompt, result))
            ]
            scores = await self._reward.score(trajectories, texts)
            check_scores(scores, trajectories, source=str(config.reward and config.reward.function))
            self.scores.extend(score.value for score in scores if isinstance(score, Score))
        self.tokens += sum(sample.length for sample in result.samples)
        self._rows.append(make_row(prompt, result, texts, scores))
