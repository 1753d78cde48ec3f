"""Rewards while generation goes on: a group of samples is scored as soon as it is finished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rlhf_core import (
    DroppedSample,
    RewardFunction,
    Score,
    Trajectory,
    check_scores,
    keep_scored,
    note_progress,
)

Decode = Callable[[Sequence[Trajectory]], Sequence[str]]
"""Trajectories to the texts of their responses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """The samples of one prompt with their scores: what generation hands to training."""

    trajectories: tuple[Trajectory, ...]
    """Those that have a score. Where a score says at which tokens its parts fell, these are the trajectory's
    `rewards`."""
    scores: tuple[Score, ...]
    """One per trajectory."""
    dropped: tuple[DroppedSample, ...] = ()
    """Samples that an environment or the reward's failure handling dropped; they are not among the trajectories."""
    greedy_score: float | None = None
    """Score of the greedy response to the same prompt, where the algorithm asks for it (ReMax)."""

    def __post_init__(self) -> None:
        if len(self.trajectories) != len(self.scores):
            raise ValueError(f"a group of {len(self.trajectories)} trajectories has {len(self.scores)} scores")

    @property
    def scores_differ(self) -> bool:
        """Whether the scores tell the samples apart, from each other or from the greedy response.

        Equal scores give advantages of zero in every group-relative algorithm.
        """
        values = [score.value for score in self.scores]
        if values and self.greedy_score is not None:
            values.append(self.greedy_score)
        return bool(values) and max(values) - min(values) > 1e-8


async def score_group(
    samples: Sequence[Trajectory | DroppedSample], reward: RewardFunction, decode: Decode
) -> ScoredGroup:
    """Score the finished samples of one prompt.

    Args:
        samples: trajectories, and what an environment dropped.
        reward: is not asked if there is no trajectory.
        decode: gives the reward the responses' texts; runs in a thread.

    Raises:
        RewardError: the reward failed, or did not return one score per trajectory.
    """
    trajectories = [sample for sample in samples if isinstance(sample, Trajectory)]
    lost = [sample for sample in samples if isinstance(sample, DroppedSample)]
    if not trajectories:
        return ScoredGroup(trajectories=(), scores=(), dropped=tuple(lost))
    texts = await asyncio.to_thread(decode, trajectories)
    scores = await reward.score(trajectories, texts)
    note_progress("scores", len(scores))
    check_scores(scores, trajectories, source=getattr(reward, "name", type(reward).__name__))
    kept, values, dropped = keep_scored(trajectories, scores)
    placed = [replace(t, rewards=s.rewards) if s.rewards else t for t, s in zip(kept, values, strict=True)]
    return ScoredGroup(trajectories=tuple(placed), scores=tuple(values), dropped=(*lost, *dropped))


async def score_as_finished(
    groups: Iterable[Awaitable[Sequence[Trajectory | DroppedSample]]],
    reward: RewardFunction,
    decode: Decode,
    *,
    max_batches: int = 64,
) -> AsyncIterator[tuple[int, ScoredGroup]]:
    """Generate all groups at once, score each when it is finished, and yield them in the order of completion.

    Yields each group with its place among `groups`.

    Args:
        groups: generation of one group each, for instance an agent loop's `run_group`.
        reward: must do its work off the event loop, as all rewards of this package do: then generation goes on.
        decode: gives the reward the responses' texts; runs in a thread.
        max_batches: groups in scoring at the same time; further ones wait, generation does not.

    The first error ends everything that is under way and is raised. So does leaving the loop early.
    """
    room = asyncio.Semaphore(max_batches)

    async def run(index: int, group: Awaitable[Sequence[Trajectory | DroppedSample]]) -> tuple[int, ScoredGroup]:
        samples = await group
        async with room:
            return index, await score_group(samples, reward, decode)

    tasks = [asyncio.ensure_future(run(index, group)) for index, group in enumerate(groups)]
    try:
        for finished in asyncio.as_completed(tasks):
            yield await finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
