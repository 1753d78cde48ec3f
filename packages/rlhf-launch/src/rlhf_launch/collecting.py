"""The samples of one step: generated, scored group by group as they finish, filtered and refilled if wanted."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_core import DeadlineExceeded, Failed, RewardError, SamplingConfig, Score, Trajectory
from rlhf_rollout.overlapped_scoring import ScoredGroup, score_as_finished

from rlhf_launch.prompts import Prompt
from rlhf_launch.sampling_step import group_sampler

if TYPE_CHECKING:
    from rlhf_launch.online import OnlineRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The scored samples of one prompt."""

    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...]

    @property
    def teaches(self) -> bool:
        """True if its scores differ: equal ones give advantages of zero in every group-relative algorithm."""
        values = [score.value for score in self.scores]
        return bool(values) and max(values) - min(values) > 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a step trains on, and what became of every prompt that was taken for it."""

    groups: Sequence[Group]
    surplus: Sequence[Group] = ()
    """Accepted groups beyond the step's size; they open the next step."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`rollout` until the last sample was finished; `reward`, what scoring took beyond that."""
    counts: dict[str, float] = field(default_factory=dict)
    """The ledger: prompts taken, groups accepted, filtered and carried over, samples dropped."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All samples, group by group."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def scores(self) -> list[Score]:
        """Their scores."""
        return [score for group in self.groups for score in group.scores]


def collect(run: OnlineRun, step: int) -> Collected:
    """The scored samples of one training step.

    With `rollout.dynamic_sampling` (DAPO, Yu et al. 2025, section 3.2) groups whose scores are all equal are
    replaced by new prompts, for at most `max_rounds` further rounds. Accepted groups are never thrown away: those
    beyond the step's size open the next one, and a step that stays short trains on what it has.
    """
    config, dynamic = run.config, run.config.rollout.dynamic_sampling
    want = config.train.prompts_per_step
    accepted, flat = list(run.state.surplus), []
    counts = {"carried_over": float(len(accepted)), "prompts": 0.0, "filtered": 0.0, "dropped_samples": 0.0}
    seconds = {"rollout": 0.0, "reward": 0.0}
    rounds = 1 + (dynamic.max_rounds if dynamic is not None else 0)
    for number in range(rounds):
        missing = want - len(accepted)
        if missing <= 0:
            break
        prompts = run.prompts.take(math.ceil(missing * (dynamic.oversample if dynamic is not None else 1.0)))
        label = str(step) if number == 0 else f"{step}.{number}"
        groups, spent, dropped = sample_and_score(
            run, prompts, config.rollout.sampling, label=label, samples=config.rollout.samples_per_prompt
        )
        keep = [group for group in groups if dynamic is None or group.teaches]
        flat += [group for group in groups if dynamic is not None and not group.teaches]
        accepted += keep
        counts["prompts"] += len(prompts)
        counts["dropped_samples"] += dropped
        for phase in seconds:
            seconds[phase] += spent[phase]
    counts["filtered"] = float(len(flat))
    counts["accepted"] = float(len(accepted))
    # With nothing to learn from, the step still runs on something: its advantages are zero.
    chosen = accepted[:want] or flat[:want]
    if not chosen:
        raise RewardError(
            f"step {step}: no sample of {counts['prompts']:g} prompts has a score; see the warnings above"
        )
    return Collected(groups=chosen, surplus=accepted[want:], seconds=seconds, counts=counts)


def sample_and_score(
    run: OnlineRun, prompts: Sequence[Prompt], sampling: SamplingConfig, *, label: str, samples: int
) -> tuple[list[Group], dict[str, float], int]:
    """Groups in the order of the prompts, seconds by phase, and the number of samples dropped by the reward policy.

    Raises:
        DeadlineExceeded: names how many prompts were unfinished.
        RewardError: a reward failed and the policy is to stop.
    """
    timeout_s, rewarder = run.config.placement.timeout_s, run.roles.rewarder
    agent, seed = run.config.rollout.agent, run.config.seed
    sample = group_sampler(run.roles.pool, sampling, agent, rewarder.tokenizer, seed=seed)
    begin = time.perf_counter()
    finished: list[float] = []
    scored: dict[int, ScoredGroup] = {}

    async def generate(index: int, prompt: Prompt) -> Sequence[Trajectory]:
        group = await sample(prompt, f"{label}/{index}", samples)
        finished.append(time.perf_counter())
        return group

    async def everything() -> None:
        work: list[Awaitable[Sequence[Trajectory]]] = [generate(i, prompt) for i, prompt in enumerate(prompts)]
        async for group in score_as_finished(work, rewarder.reward, rewarder.decode):
            scored[group.index] = group

    try:
        asyncio.run(asyncio.wait_for(everything(), timeout_s))
    except TimeoutError:
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for samples and scores; {len(prompts) - len(scored)} of {len(prompts)} prompts"
            f" were unfinished, {len(finished)} of them generated. Raise placement.timeout_s, or speed it up"
        ) from None
    last = max(finished, default=begin)
    spent = {"rollout": last - begin, "reward": time.perf_counter() - last}
    groups = [_without_failures(scored[index]) for index in sorted(scored)]
    kept = [group for group in groups if group.trajectories]
    return kept, spent, len(prompts) * samples - sum(len(group.trajectories) for group in kept)


def _without_failures(group: ScoredGroup) -> Group:
    pairs = zip(group.trajectories, group.scores, strict=True)
    kept = [(trajectory, score) for trajectory, score in pairs if not isinstance(score, Failed)]
    # Where a score says that its parts fell (a process reward) travels with the tokens.
    placed = [replace(t, rewards=score.rewards) if score.rewards else t for t, score in kept]
    return Group(trajectories=tuple(placed), scores=tuple(s for _, s in kept))
