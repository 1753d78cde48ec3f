"""The `data` section of a run, with `data.curriculum`: which prompts come when."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from rlhf_core import ConfigError, check_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class EasyToHard:
    """Prompts open up from easy to hard by a column of the data (competence-based pacing, Platanios et al. 2019,
    1903.09848, with a linear course)."""

    column: str
    """A column of numbers, small for easy."""
    steps: int
    """Steps until all prompts are open."""
    start: float = 0.2
    """Share of each dataset, the easiest of it, that is open at the first step."""

    def __post_init__(self) -> None:
        check_whole("data.curriculum.difficulty.steps", self.steps, at_least=1)
        if not 0 < self.start <= 1:
            raise ConfigError(f"data.curriculum.difficulty.start must be in (0, 1], got {self.start}")

    def open_share(self, step: int) -> float:
        """Share of each dataset that is open after `step` steps.

        >>> [EasyToHard(column="level", steps=10).open_share(step) for step in (0, 5, 99)]
        [0.2, 0.6, 1.0]
        """
        return self.start + (1 - self.start) * min(1.0, step / self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixturePoint:
    """Weights of the datasets at a step; between two such points they change linearly."""

    step: int
    weights: tuple[float, ...]
    """How probable a draw from each dataset of `data.train` is, relative to the others, in their order."""

    def __post_init__(self) -> None:
        check_whole("data.curriculum.mixture: step", self.step, at_least=0)
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights) or not any(self.weights):
            raise ConfigError(
                f"data.curriculum.mixture: weights at step {self.step} must be finite, not negative and not all 0, "
                f"got {list(self.weights)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumSection:
    """Which prompts are drawn when: by the success measured in the run, by a column of difficulty, by a mixture of
    datasets that changes. All of it follows from the seed and the samples, and is part of checkpoints."""

    target_success_rate: float | None = None
    """Success rate at which a prompt is drawn most often, e.g. 0.5, where a group of samples teaches most. A prompt
    that was not measured yet counts as if it were there. Null draws those that came least often, whatever their
    success."""
    sharpness: float = 2.0
    """With a target: a prompt's weight is (1 - distance / largest distance) to this power, the distance being that
    of its success rate from the target."""
    min_weight: float = 0.05
    """With a target: the least weight, so that every prompt may come back."""
    decay: float = 0.5
    """A prompt's success rate is an average over its visits, in which a visit counts this much less than the next
    one; 0 keeps the last visit alone."""
    pass_score: float = 0.5
    """A sample succeeds with a score above this."""
    cooldown_steps: int = 0
    """Steps for which a prompt stays out after all its samples have scored alike; then it may come again. Where no
    other is left, the one that rested longest comes earlier."""
    difficulty: EasyToHard | None = None
    """See `EasyToHard`; null draws from all prompts at once."""
    mixture: tuple[MixturePoint, ...] = ()
    """Weights of the datasets by step, in place of `data.train[].weight`: [{step: 0, weights: [9, 1]}, {step: 200,
    weights: [1, 9]}]. Before the first and after the last point they stay."""

    def __post_init__(self) -> None:
        target = self.target_success_rate
        if target is not None and not 0 <= target <= 1:
            raise ConfigError(f"data.curriculum.target_success_rate must be in [0, 1], got {target}")
        if not (math.isfinite(self.sharpness) and self.sharpness > 0):
            raise ConfigError(f"data.curriculum.sharpness must be positive, got {self.sharpness}")
        if not 0 < self.min_weight <= 1:
            raise ConfigError(f"data.curriculum.min_weight must be in (0, 1], got {self.min_weight}")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"data.curriculum.decay must be in [0, 1), got {self.decay}")
        check_whole("data.curriculum.cooldown_steps", self.cooldown_steps, at_least=0)
        steps = [point.step for point in self.mixture]
        if steps != sorted(set(steps)):
            raise ConfigError(f"data.curriculum.mixture: steps must rise from point to point, got {steps}")
        if not (self.needs_scores or self.difficulty is not None or self.mixture):
            raise ConfigError(
                "data.curriculum says nothing: write target_success_rate, cooldown_steps, difficulty or mixture, "
                "or leave it out"
            )

    @property
    def needs_scores(self) -> bool:
        """Whether it goes by what the samples scored."""
        return self.target_success_rate is not None or self.cooldown_steps > 0

    def weights_at(self, step: int) -> tuple[float, ...]:
        """Weights of the datasets after `step` steps; empty without a mixture.

        >>> points = (MixturePoint(step=0, weights=(1.0, 0.0)), MixturePoint(step=10, weights=(0.0, 2.0)))
        >>> [CurriculumSection(mixture=points).weights_at(step) for step in (0, 5, 30)]
        [(1.0, 0.0), (0.5, 1.0), (0.0, 2.0)]
        """
        points = self.mixture
        if not points:
            return ()
        later = bisect_right([point.step for point in points], step)
        if later in (0, len(points)):
            return points[max(0, later - 1)].weights
        before, after = points[later - 1], points[later]
        way = (step - before.step) / (after.step - before.step)
        return tuple((1 - way) * a + way * b for a, b in zip(before.weights, after.weights, strict=True))
