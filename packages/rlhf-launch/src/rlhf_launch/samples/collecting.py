"""What a step trains on; and samples with scores for a given list of prompts, beside the training stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_core import DeadlineExceeded, SamplingConfig, Score, Trajectory
from rlhf_rollout import ScoredGroup, score_as_finished

from rlhf_launch.samples.groups import Group, group_of, oldest_version
from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.samples.sample import group_sampler

if TYPE_CHECKING:
    from rlhf_launch.online.loop import OnlineRun


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """What a step trains on."""

    groups: Sequence[Group]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """That the step had to wait: `rollout` until the last sample was generated, `reward` beyond that."""
    counts: dict[str, float] = field(default_factory=dict)
    """The ledger: prompts started, used, filtered and dropped since the last step; in flight and waiting now."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All samples, group by group."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def scores(self) -> list[Score]:
        """Their scores."""
        return [score for group in self.groups for score in group.scores]

    def staleness(self, version: int) -> dict[str, float]:
        """Weight updates between each sample's oldest token and the weights that are trained now: mean and max."""
        found = [version - oldest for t in self.trajectories if (oldest := oldest_version(t)) >= 0]
        if not found:
            return {}
        return {"staleness/mean": sum(found) / len(found), "staleness/max": float(max(found))}


def sample_and_score(
    run: OnlineRun, prompts: Sequence[Prompt], sampling: SamplingConfig, *, label: str, samples: int
) -> tuple[list[Group], int]:
    """Groups in the order of the prompts, and the number of samples that have no score.

    They queue at the engines beside what the training stream has under way, which is left as it is.

    Raises:
        DeadlineExceeded: names how many prompts were unfinished.
        RewardError: a reward failed and the policy is to stop.
    """
    timeout_s, rewarder = run.config.placement.timeout_s, run.roles.rewarder
    agent, longest = run.config.rollout.agent, run.config.max_length
    sample = group_sampler(
        run.roles.pool, sampling, agent, rewarder.tokenizer, max_tokens=longest, seed=run.config.seed
    )
    scored: dict[int, ScoredGroup] = {}

    async def everything() -> None:
        work: list[Awaitable[Sequence[Trajectory]]] = [
            sample(prompt, f"{label}/{index}", samples) for index, prompt in enumerate(prompts)
        ]
        async for group in score_as_finished(work, rewarder.reward, rewarder.decode):
            scored[group.index] = group

    begin = time.perf_counter()
    try:
        asyncio.run(asyncio.wait_for(everything(), timeout_s))
    except TimeoutError:
        raise DeadlineExceeded(
            f"waited {time.perf_counter() - begin:.0f} s for samples and scores of {label}; "
            f"{len(prompts) - len(scored)} of {len(prompts)} prompts were unfinished. Raise "
            "placement.timeout_s, or speed it up"
        ) from None
    groups = [group_of(scored[index]) for index in sorted(scored)]
    kept = [group for group in groups if group.trajectories]
    return kept, len(prompts) * samples - sum(len(group.trajectories) for group in kept)
