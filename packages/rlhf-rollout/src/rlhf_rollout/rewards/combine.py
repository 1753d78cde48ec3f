"""The weighted sum of several rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_core import (
    Closable,
    ConfigError,
    DroppedSample,
    PlacesRewards,
    RewardFunction,
    Score,
    Trajectory,
    check_scores,
)

from rlhf_rollout.concurrency import gather_or_cancel


class CombinedReward:
    """Weighted sum of several rewards, run at once. Each part is logged under its name, unweighted.

    Where parts say at which tokens their score fell, the weighted sum says it too.

    >>> CombinedReward({"correct": correct, "format": tidy}, weights={"format": 0.2})      # doctest: +SKIP
    """

    def __init__(self, rewards: Mapping[str, RewardFunction], weights: Mapping[str, float] | None = None) -> None:
        weights = weights or {}
        if not rewards:
            raise ConfigError("a combined reward needs at least one part, got none")
        if unknown := sorted(set(weights) - set(rewards)):
            raise ConfigError(
                f"weight for {unknown[0]!r}, but the combined reward has the parts {', '.join(sorted(rewards))}"
            )
        self._rewards = dict(rewards)
        self._weights = {name: float(weights.get(name, 1.0)) for name in rewards}

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score | DroppedSample]:
        """See RewardFunction; the components of a part `a` appear as `a` and `a/<component>`.

        A sample that a part drops is dropped. Where a part raises, the others are ended and its error goes on.
        """
        parts = await gather_or_cancel(reward.score(trajectories, texts) for reward in self._rewards.values())
        for name, scores in zip(self._rewards, parts, strict=True):
            check_scores(scores, trajectories, source=name)
        return [self._sum(dict(zip(self._rewards, row, strict=True))) for row in zip(*parts, strict=True)]

    def placed(self, trajectory: Trajectory) -> Sequence[float]:
        """See PlacesRewards."""
        total: list[float] = []
        for name, reward in self._rewards.items():
            part = reward.placed(trajectory) if isinstance(reward, PlacesRewards) else ()
            if len(part):
                before = total or [0.0] * len(part)
                total = [a + self._weights[name] * b for a, b in zip(before, part, strict=True)]
        return total

    def close(self) -> None:
        """Close all parts that have a `close`."""
        for reward in self._rewards.values():
            if isinstance(reward, Closable):
                reward.close()

    def _sum(self, parts: Mapping[str, Score | DroppedSample]) -> Score | DroppedSample:
        value, components = 0.0, {}
        rewards: list[float] = []
        for name, part in parts.items():
            if isinstance(part, DroppedSample):
                return DroppedSample(sample_id=part.sample_id, reason=f"{name}: {part.reason}")
            value += self._weights[name] * part.value
            components[name] = part.value
            components |= {f"{name}/{inner}": number for inner, number in part.components.items()}
            if part.rewards:
                before = rewards or [0.0] * len(part.rewards)
                rewards = [a + self._weights[name] * b for a, b in zip(before, part.rewards, strict=True)]
        return Score(value=value, components=components, rewards=tuple(rewards))
