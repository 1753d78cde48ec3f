"""Scored groups of samples: made from prompts, then put together as the batch of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from rlhf_core import (
    Batch,
    CapabilityError,
    DroppedSample,
    RaggedBatch,
    Run,
    SamplingConfig,
    Trajectory,
)
from rlhf_rollout import ScoredGroup, gather_or_cancel, score_group

from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.samples.reward import Rewarder
from rlhf_launch.samples.sampling import GroupSampler
from rlhf_launch.workers.episodes import EPISODES
from rlhf_launch.workers.waits import Waits


class GroupMaker:
    """Makes a scored group of a prompt: draws the samples, and scores them as soon as they are finished."""

    def __init__(
        self,
        sample: GroupSampler,
        rewarder: Rewarder,
        *,
        greedy: GroupSampler | None = None,
        max_in_scoring: int = 64,
    ) -> None:
        """Make groups of what is drawn and scored.

        Args:
            sample: draws the samples of a prompt.
            rewarder: scores them.
            greedy: draws the most likely response; given where the algorithm compares samples with its score.
            max_in_scoring: groups that are scored at the same time; further ones wait, generation does not.
        """
        self._sample, self._rewarder, self._greedy = sample, rewarder, greedy
        self._max_in_scoring = max_in_scoring
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def group(
        self, prompt: Prompt, label: str, samples: int, *, generated: Callable[[], None] = lambda: None
    ) -> ScoredGroup:
        """The samples of one prompt with their scores.

        Args:
            prompt: may be under way more than once, with other labels.
            label: unique in the run; sample ids and seeds follow from it.
            samples: how many.
            generated: called when the last token is there, before the scoring.

        Raises:
            RewardError: a reward failed, and its failure handling says to stop.
        """
        if self._greedy is None:
            drawn = await self._sample(prompt, label, samples)
            generated()
            return await self._score(drawn)
        drawn, likeliest = await gather_or_cancel(
            [_awaited(self._sample(prompt, label, samples)), _awaited(self._greedy(prompt, f"{label}/greedy", 1))]
        )
        generated()
        group, baseline = await gather_or_cancel([self._score(drawn), self._score(likeliest)])
        return _with_greedy_score(group, baseline)

    async def _score(self, drawn: Sequence[Trajectory | DroppedSample]) -> ScoredGroup:
        loop = asyncio.get_running_loop()
        async with self._rooms.setdefault(loop, asyncio.Semaphore(self._max_in_scoring)):
            return await score_group(drawn, self._rewarder.reward, self._rewarder.decode)

    def groups(
        self, prompts: Sequence[Prompt], *, label: str, samples: int, waits: Waits | None = None
    ) -> list[ScoredGroup]:
        """The groups of all prompts, in order. It blocks, and may be called while an event loop is running.

        Args:
            prompts: all of them are started at once and queue at the engines.
            label: unique in the run; the samples of prompt i are `<label>/<i>/0`, ...
            samples: per prompt.
            waits: how all of them are waited for.

        Raises:
            DeadlineExceeded: nothing has moved for too long; names how many prompts were unfinished.
            RewardError: a reward failed, and its failure handling says to stop.
        """
        found: dict[int, ScoredGroup] = {}

        async def one(index: int, prompt: Prompt) -> None:
            found[index] = await self.group(prompt, f"{label}/{index}", samples)

        async def everything() -> None:
            calls = [one(index, prompt) for index, prompt in enumerate(prompts)]
            await gather_or_cancel(calls)

        def what() -> str:
            left = len(prompts) - len(found)
            return f"samples and scores of {label} ({left} of {len(prompts)} prompts are unfinished)"

        (waits or Waits()).run(everything(), what=what)
        return [found[index] for index in range(len(prompts))]


class MakeGroups(Protocol):
    """Gives what makes groups with some settings of sampling."""

    def __call__(self, sampling: SamplingConfig, *, greedy_scores: bool = False) -> GroupMaker:
        """Draw with these settings; with `greedy_scores`, also score the most likely response to each prompt."""
        ...


def collate_groups(groups: Sequence[ScoredGroup]) -> Batch:
    """The samples of all groups as a batch with padding; see `rows_of_groups`."""
    return rows_of_groups(groups).padded()


def rows_of_groups(groups: Sequence[ScoredGroup]) -> RaggedBatch:
    """The samples of all groups as a batch, row after row, in the memory that they came in.

    Its columns are those of `rlhf_core.collate`, and `scores` [rows], `group_ids` [rows] (rows of one prompt share
    a number), `episode_ids` [rows] likewise where an episode has several rows, `truncated` [rows], `greedy_scores`
    [rows] where the groups have them, and `score/<part>` [rows] for every part that all scores name.

    Raises:
        CapabilityError: a sample has images of an environment, which the training engines cannot see.
        ValueError: there is no sample.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        if trajectory.images:
            raise CapabilityError(
                f"sample {trajectory.sample_id!r} has {len(trajectory.images)} image(s) from its environment, of "
                "which nothing makes what a training engine is shown, so its log-probs would be computed without "
                "them; give images with the prompts, or use such environments for generation alone"
            )
    sizes = torch.tensor([len(group.trajectories) for group in groups])
    columns = {
        "scores": torch.tensor([score.value for group in groups for score in group.scores], dtype=torch.float32),
        "group_ids": torch.arange(len(groups)).repeat_interleave(sizes),
        "truncated": torch.tensor([trajectory.truncated for trajectory in trajectories]),
    }
    episodes = [episode for group in groups for episode in group.episodes]
    if len(episodes) < len(trajectories):
        columns[EPISODES] = torch.arange(len(episodes)).repeat_interleave(torch.tensor(list(map(len, episodes))))
    greedy_scores = [group.greedy_score for group in groups for _ in group.trajectories]
    if None not in greedy_scores:
        columns["greedy_scores"] = torch.tensor(greedy_scores, dtype=torch.float32)
    scores = [score for group in groups for score in group.scores]
    for part in sorted(set.intersection(*(set(score.components) for score in scores))) if scores else ():
        values = [score.components[part] for score in scores]
        columns[f"score/{part}"] = torch.tensor(values, dtype=torch.float32)
    return RaggedBatch.of_trajectories(trajectories).with_columns(**columns)


def staleness(groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
    """Weight updates between each sample's oldest token and the weights that are trained now: mean and max."""
    spans = [span for group in groups for one in group.trajectories if (span := version_span([one])) is not None]
    if not spans:
        return {}
    found = [version - oldest for oldest, _ in spans]
    return {"staleness/mean": sum(found) / len(found), "staleness/max": float(max(found))}


def version_span(trajectories: Iterable[Trajectory]) -> tuple[int, int] | None:
    """The oldest and the newest weights of all sampled tokens; None where nothing was sampled."""
    found: list[int] = []
    for trajectory in trajectories:
        for part in trajectory.weight_versions.parts:
            known = [part.value] if isinstance(part, Run) else part[part >= 0].tolist()
            found += [version for version in (min(known, default=-1), max(known, default=-1)) if version >= 0]
    return (min(found), max(found)) if found else None


async def _awaited(samples: Awaitable[list[Trajectory | DroppedSample]]) -> list[Trajectory | DroppedSample]:
    return await samples


def _with_greedy_score(group: ScoredGroup, likeliest: ScoredGroup) -> ScoredGroup:
    """The group with the score of the greedy response, without which none of its samples can be used."""
    if likeliest.scores:
        return replace(group, greedy_score=likeliest.scores[0].value)
    reason = f"the greedy response has no score: {likeliest.dropped[0].reason}"
    lost = [DroppedSample(sample_id=trajectory.sample_id, reason=reason) for trajectory in group.trajectories]
    return ScoredGroup(trajectories=(), scores=(), dropped=(*group.dropped, *lost))
