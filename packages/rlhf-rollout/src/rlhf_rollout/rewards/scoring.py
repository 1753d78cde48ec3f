"""Rewards while generation goes on: a group of samples is scored as soon as it is finished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rlhf_core import (
    DroppedSample,
    PlacesRewards,
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
    """Those that have a score; those of one episode stand together and have one score. Where a score says at which
    tokens its parts fell, these are the trajectory's `rewards`."""
    scores: tuple[Score, ...]
    """One per trajectory."""
    dropped: tuple[DroppedSample, ...] = ()
    """Samples that an environment or the reward's failure handling dropped; they are not among the trajectories."""
    greedy_score: float | None = None
    """Score of the greedy response to the same prompt, where the algorithm asks for it (ReMax)."""

    def __post_init__(self) -> None:
        if len(self.trajectories) != len(self.scores):
            raise ValueError(f"a group of {len(self.trajectories)} trajectories has {len(self.scores)} scores")
        for branches in self.episodes:
            if len({self.scores[row].value for row in branches}) > 1:
                name = self.trajectories[branches[0]].episode_id
                raise ValueError(f"the trajectories of episode {name!r} have several scores; an episode has one")

    @property
    def episodes(self) -> tuple[range, ...]:
        """The places of each episode's trajectories."""
        names = [_episode_of(place, trajectory) for place, trajectory in enumerate(self.trajectories)]
        starts = [row for row, name in enumerate(names) if not row or name != names[row - 1]]
        if len({names[row] for row in starts}) != len(starts):
            raise ValueError("the trajectories of an episode must stand together in their group")
        return tuple(map(range, starts, [*starts[1:], len(names)]))

    @property
    def episode_scores(self) -> list[Score]:
        """One per episode: that of its last trajectory."""
        return [self.scores[rows[-1]] for rows in self.episodes]

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

    The reward is asked about the last trajectory of each episode; the others of the episode have its score.

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
    by_name: dict[object, list[Trajectory]] = {}
    for place, trajectory in enumerate(trajectories):
        by_name.setdefault(_episode_of(place, trajectory), []).append(trajectory)
    episodes = {id(branches[-1]): branches for branches in by_name.values()}
    finals = [branches[-1] for branches in by_name.values()]
    texts = await asyncio.to_thread(decode, finals)
    scores = await reward.score(finals, texts)
    note_progress("scores", len(scores))
    check_scores(scores, finals, source=getattr(reward, "name", type(reward).__name__))
    kept, values, dropped = keep_scored(finals, scores)
    placed: list[Trajectory] = []
    scored: list[Score] = []
    for final, score in zip(kept, values, strict=True):
        earlier = [_placed(branch, reward) for branch in episodes[id(final)][:-1]]
        placed += [*earlier, replace(final, rewards=score.rewards) if score.rewards else final]
        scored += [*(replace(score, rewards=branch.rewards) for branch in earlier), score]
    return ScoredGroup(trajectories=tuple(placed), scores=tuple(scored), dropped=(*lost, *dropped))


def _episode_of(place: int, trajectory: Trajectory) -> object:
    """What trajectories of one episode have in common; one that has its episode's own id is all of it."""
    return place if trajectory.episode_id == trajectory.sample_id else trajectory.episode_id


def _placed(branch: Trajectory, reward: RewardFunction) -> Trajectory:
    """A trajectory that is not the last of its episode, with what the reward pays at its tokens."""
    return replace(branch, rewards=reward.placed(branch) if isinstance(reward, PlacesRewards) else ())


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
