"""Scores for answers that are there already: no generator is started; goes on after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rlhf_algos import LengthSection, naming_full_disk, to_plain
from rlhf_core import ConfigError, SamplingConfig, Score, check_scores

from rlhf_launch.config.generate import GenerateConfig
from rlhf_launch.config.paths import absolute
from rlhf_launch.config.placement import REWARD
from rlhf_launch.config.rollout import RolloutSection
from rlhf_launch.generation.lanes import in_lanes
from rlhf_launch.generation.rows import GeneratedRows
from rlhf_launch.placement.plans import reward_plans
from rlhf_launch.placement.resolve import ResolvedBackends, resolve_backends
from rlhf_launch.placement.start import executor_of, start_workers
from rlhf_launch.samples.prompts import policy_tokenizer
from rlhf_launch.samples.reward import CheckedReward, Rewarder, check_reward, open_reward
from rlhf_launch.scoring.answers import Answered, digest_of, load_answers
from rlhf_launch.workers.devices import SharedDevices
from rlhf_launch.workers.waits import Waits

_AT_ONCE = 512
"""Answers that are being scored at the same time: enough for the batches of reward models and servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringReport:
    """What one call did."""

    prompts: int
    """In the data."""
    written: int
    found: int
    """Rows that an earlier call had written."""
    answers: int
    """Scored by this call."""
    dropped: int
    """Of these, answers without a score, by the reward's failure handling."""
    mean_score: float | None


def score(config: GenerateConfig, *, console: Console | None = None) -> ScoringReport:
    """Score what is still missing in the output file.

    Args:
        config: `data.train` are the answers; `model` names the tokenizer of the policy they came from, whose
            weights are not loaded; `rollout` says nothing here.
        console: is told what is up.

    Raises:
        UserError: an input is at fault; nothing heavy was started.
        ResourceError: the disk is full, or the output cannot be written.
        RewardError: the reward function failed; finished rows are in the file, the next call goes on from there.
    """
    with naming_full_disk(config.output.parent):
        return _score(absolute(config), console or Console(highlight=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    config: GenerateConfig
    """With room for the answers that there are."""
    backends: ResolvedBackends
    tokenizer: Any
    answered: list[Answered]
    reward: CheckedReward


@contextmanager
def _checked_inputs(config: GenerateConfig) -> Iterator[_Inputs]:
    reward = config.reward
    if reward is None:
        raise ConfigError("there is no reward to score by; give reward.function, reward.model or reward.parts")
    tokenizer = policy_tokenizer(config.model)
    answered = load_answers(config.data, tokenizer)
    config = _with_room(config, answered)
    backends = resolve_backends(config, trains=False)
    with ExitStack() as stack:
        trusted = config.model.trust_remote_code
        checked = check_reward(reward, tokenizer, environment=False, trust_remote_code=trusted)
        stack.callback(checked.close)
        prompts = [one.prompt for one in answered]
        places = {one.prompt.prompt_id: one.place for one in answered}
        checked.check_columns(prompts, config.data.description, environment=False, places=places)
        yield _Inputs(config=config, backends=backends, tokenizer=tokenizer, answered=answered, reward=checked)


def _with_room(config: GenerateConfig, answered: list[Answered]) -> GenerateConfig:
    """The configuration of the engines: with the lengths that the data has, and without a generator."""
    prompt = max(len(one.prompt.token_ids) for one in answered)
    answer = max(one.longest for one in answered)
    return replace(
        config,
        lengths=LengthSection(max_prompt_tokens=prompt),
        rollout=RolloutSection(samples_per_prompt=1, sampling=SamplingConfig(max_tokens=answer)),
    )


def _settings(inputs: _Inputs) -> dict[str, Any]:
    """What decides the content of the output."""
    config = inputs.config
    reward = config.reward
    return {
        "answers": digest_of(inputs.answered),
        "reward": None if reward is None else to_plain(reward.all_parts(environment=False)),
        "dtype": config.model.dtype,
    }


def _score(config: GenerateConfig, console: Console) -> ScoringReport:
    with ExitStack() as stack:
        inputs = stack.enter_context(_checked_inputs(config))
        prompts = [one.prompt for one in inputs.answered]
        rows = stack.enter_context(GeneratedRows(config.output, _settings(inputs)))
        missing = {prompt.prompt_id for prompt in rows.pending(prompts)}
        pending = [one for one in inputs.answered if one.prompt.prompt_id in missing]
        if rows.done:
            console.print(f"{len(prompts) - len(pending)} of {len(prompts)} rows are done already")
        total = len(prompts)
        if not pending:
            return ScoringReport(prompts=total, written=0, found=total, answers=0, dropped=0, mean_score=None)
        rewarder, waits = stack.enter_context(_start(inputs, console))
        progress = stack.enter_context(Progress(console=console, transient=True))
        bar = progress.add_task("rows", total=total, completed=total - len(pending))
        work = _Work(rewarder, rows, advance=lambda: progress.advance(bar))
        lanes = max(1, _AT_ONCE // max(len(one.samples) for one in pending))
        scoring = in_lanes(pending, work.one, lanes=lanes)
        waits.run(scoring, what=lambda: f"the scores of {len(pending) - work.done} rows")
    return ScoringReport(
        prompts=total,
        written=len(pending),
        found=total - len(pending),
        answers=work.answers,
        dropped=work.answers - len(work.scores),
        mean_score=sum(work.scores) / len(work.scores) if work.scores else None,
    )


@contextmanager
def _start(inputs: _Inputs, console: Console) -> Iterator[tuple[Rewarder, Waits]]:
    """The reward with its models, if it has any."""
    config, backends = inputs.config, inputs.backends
    waits = Waits(config.placement.timeout_s)
    plans = {f"{REWARD}{name}": ranks for name, ranks in reward_plans(config, backends).items()}
    devices = SharedDevices(config.shared)
    with ExitStack() as stack:
        groups = {}
        if plans:
            starting = start_workers(
                executor_of(config, backends), plans, (), waits=waits, devices=devices, say=console.print
            )
            groups = stack.enter_context(starting).training
            stack.enter_context(devices.at_work(*groups))
        reward, close = open_reward(inputs.reward, groups, inputs.tokenizer)
        stack.callback(close)
        yield Rewarder(reward, inputs.tokenizer), waits


class _Work:
    """Scores many rows at once; each is written as soon as its answers have their scores."""

    def __init__(self, rewarder: Rewarder, rows: GeneratedRows, *, advance: Callable[[], None]) -> None:
        self._rewarder, self._rows, self._advance = rewarder, rows, advance
        self.done = 0
        self.answers = 0
        self.scores: list[float] = []

    async def one(self, answered: Answered) -> None:
        """Score and write a row."""
        trajectories = answered.trajectories()
        scores = await self._rewarder.reward.score(trajectories, answered.texts)
        check_scores(scores, trajectories, source="of rlhf score")
        self._rows.append(answered.written(scores))
        self.scores.extend(score.value for score in scores if isinstance(score, Score))
        self.answers += len(trajectories)
        self.done += 1
        self._advance()
