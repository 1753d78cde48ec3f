"""Rewards while generation goes on: a group of samples is scored as soon as it is finished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from rlhf_core import DroppedSample, RewardFunction, Score, Trajectory, check_scores, keep_scored

Decode = Callable[[Sequence[Trajectory]], Sequence[str]]
"""Trajectories to the texts of their responses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """The samples of one prompt with their scores, and those that were dropped."""

    index: int
    """Place among the groups that were asked for; they finish in another order."""
    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...]
    """One per trajectory."""
    failed: tuple[DroppedSample, ...] = ()
    """Samples that an environment or the reward's failure handling dropped; they are not among the trajectories."""


async def score_as_finished(
    groups: Iterable[Awaitable[Sequence[Trajectory | DroppedSample]]],
    reward: RewardFunction,
    decode: Decode,
    *,
    max_batches: int = 64,
) -> AsyncIterator[ScoredGroup]:
    """Generate all groups at once, score each when it is finished, and yield them in the order of completion.

    Args:
        groups: generation of one group each, for instance an agent loop's `run_group`.
        reward: must do its work off the event loop, as all rewards of this package do: then generation goes on.
        decode: gives the reward the responses' texts; runs in a thread.
        max_batches: groups in scoring at the same time; further ones wait, generation does not.

    The first error ends everything that is under way and is raised. So does leaving the loop early.
    """
    room = asyncio.Semaphore(max_batches)

    async def run(index: int, group: Awaitable[Sequence[Trajectory | DroppedSample]]) -> ScoredGroup:
        samples = await group
        trajectories = [sample for sample in samples if isinstance(sample, Trajectory)]
        async with room:
            texts = await asyncio.to_thread(decode, trajectories)
            scores = await reward.score(trajectories, texts)
        check_scores(scores, trajectories, source=getattr(reward, "name", type(reward).__name__))
        kept, values, failed = keep_scored(trajectories, scores)
        lost = [sample for sample in samples if isinstance(sample, DroppedSample)]
        return ScoredGroup(index=index, trajectories=tuple(kept), scores=tuple(values), failed=(*lost, *failed))

    tasks = [asyncio.ensure_future(run(index, group)) for index, group in enumerate(groups)]
    try:
        for finished in asyncio.as_completed(tasks):
            yield await finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
