"""Scores of parts of a reward, normalised by a mean and a deviation that are given, or measured at the start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_core import (
    Closable,
    ConfigError,
    DroppedSample,
    PlacesRewards,
    RewardFunction,
    RewardScale,
    Score,
    Trajectory,
)

from rlhf_launch.config.reward import RewardNormalization

RAW = "raw"
"""Component that has the score before it is normalised."""


class NormalizedReward:
    """A reward whose scores are normalised as (score - mean) / std; the component `raw` keeps what they were.

    Where parts of a score fell at certain tokens, these are divided by std, and the mean is taken off at the end.
    """

    def __init__(self, reward: RewardFunction, scale: RewardScale | None = None) -> None:
        """Normalise a reward; without a scale it must be measured first."""
        self.scale = scale
        self._reward = reward
        self._seen: list[float] | None = None

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score | DroppedSample]:
        """See RewardFunction; while the scale is measured, scores are what they were."""
        found = await self._reward.score(trajectories, texts)
        if self._seen is not None:
            self._seen += [score.value for score in found if isinstance(score, Score)]
            return list(found)
        if self.scale is None:
            raise RuntimeError("the scale of a reward must be measured, or restored, before anything is scored")
        scale = self.scale
        return [normalized(score, scale) if isinstance(score, Score) else score for score in found]

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A block whose scores give the scale; population deviation.

        Raises:
            ConfigError: they do not differ, or there is none.
        """
        self._seen = seen = []
        try:
            yield
        finally:
            self._seen = None
        if not seen:
            raise ConfigError("no sample was scored, so there is no mean and deviation to normalise by")
        mean = math.fsum(seen) / len(seen)  # in whatever order they came
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in seen) / len(seen))
        if not deviation > 0:
            raise ConfigError(
                f"all {len(seen)} samples have the score {mean:g}, so there is no deviation to normalise by; leave "
                "it out of reward.normalize, or write source: given with a mean and a std"
            )
        self.scale = RewardScale(mean=mean, std=deviation)

    def placed(self, trajectory: Trajectory) -> Sequence[float]:
        """See PlacesRewards."""
        placed = self._reward.placed(trajectory) if isinstance(self._reward, PlacesRewards) else ()
        if self.scale is None or not len(placed):
            return placed
        return [value / self.scale.std for value in placed]

    def close(self) -> None:
        """Close the reward, if it has a `close`."""
        if isinstance(self._reward, Closable):
            self._reward.close()


def normalized(score: Score, scale: RewardScale) -> Score:
    """A score by a scale, with what it was as a component."""
    return Score(
        value=(score.value - scale.mean) / scale.std,
        components={RAW: score.value, **score.components},
        rewards=[value / scale.std for value in score.rewards],
    )


class RewardScales:
    """The normalised parts of a run's reward."""

    def __init__(self, asked: Mapping[str, RewardNormalization] | None = None) -> None:
        """Of the parts that `reward.normalize` names."""
        self._asked = dict(asked or {})
        self._parts: dict[str, NormalizedReward] = {}

    def of(self, name: str, reward: RewardFunction) -> RewardFunction:
        """The part of this name, normalised if that is asked for."""
        asked = self._asked.get(name)
        if asked is None:
            return reward
        self._parts[name] = NormalizedReward(reward, asked.given)
        return self._parts[name]

    @property
    def prompts(self) -> int:
        """Prompts whose answers are needed to measure what has no scale yet; 0 if all have one."""
        unknown = [name for name, part in self._parts.items() if part.scale is None]
        return max((self._asked[name].prompts for name in unknown), default=0)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A block in which samples are drawn and scored, by which the scales that are not known are measured.

        Raises:
            ConfigError: names the part whose scores do not differ.
        """
        with self._measuring([name for name, part in self._parts.items() if part.scale is None]):
            yield

    @contextmanager
    def _measuring(self, names: Sequence[str]) -> Iterator[None]:
        if not names:
            yield
            return
        try:
            with self._parts[names[0]].measuring(), self._measuring(names[1:]):
                yield
        except ConfigError as error:
            if str(error).startswith("reward "):
                raise
            raise ConfigError(f"reward {names[0]!r}: {error}") from error

    def __str__(self) -> str:
        known = {name: part.scale for name, part in self._parts.items() if part.scale is not None}
        return ", ".join(f"{name} (score - {one.mean:.4g}) / {one.std:.4g}" for name, one in known.items())

    @property
    def metrics(self) -> dict[str, float]:
        """`reward_scale/<part>/mean` and `.../std`."""
        return {
            f"reward_scale/{name}/{what}": value
            for name, one in self.state().items()
            for what, value in one.items()
        }

    def state(self) -> dict[str, dict[str, float]]:
        """Mean and deviation of each part, as plain values."""
        return {
            name: {"mean": part.scale.mean, "std": part.scale.std}
            for name, part in self._parts.items()
            if part.scale is not None
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the scales that a run had."""
        for name, part in self._parts.items():
            if name in state:
                part.scale = RewardScale(**state[name])
