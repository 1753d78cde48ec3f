"""Mean and deviation of a reward model's scores, kept in the model's config and taken out of later scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf_core.errors import ConfigError
from rlhf_core.training.accumulation import Ranks

_MEAN, _DEVIATION = "reward_mean", "reward_std"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScale:
    """Scores are normalised as (score - mean) / std."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std > 0):
            raise ConfigError(
                f"reward scale: mean must be finite and std positive, got mean={self.mean}, std={self.std}; "
                "measure it on samples whose scores differ"
            )

    @classmethod
    def of(cls, model: Any) -> RewardScale | None:
        """The scale in the model's config; None where there is none.

        Raises:
            ConfigError: the config has a mean without a deviation or the other way round, or one of no use.
        """
        return cls.of_config({name: getattr(model.config, name, None) for name in (_MEAN, _DEVIATION)})

    @classmethod
    def of_config(cls, settings: Mapping[str, Any]) -> RewardScale | None:
        """The same, of what a model's config.json holds."""
        mean, deviation = settings.get(_MEAN), settings.get(_DEVIATION)
        if mean is None and deviation is None:
            return None
        if mean is None or deviation is None:
            raise ConfigError(f"the model's config.json has only one of {_MEAN!r} and {_DEVIATION!r}; give both")
        return cls(mean=float(mean), std=float(deviation))

    def store(self, model: Any) -> None:
        """Put the scale into the model's config: from there it is exported with the model."""
        for name, value in self.as_config().items():
            setattr(model.config, name, value)

    def as_config(self) -> dict[str, float]:
        """The keys of a model's config that hold it."""
        return {_MEAN: self.mean, _DEVIATION: self.std}

    def apply(self, scores: Tensor) -> Tensor:
        """Normalised scores."""
        return (scores - self.mean) / self.std


def measured_scale(scores: Tensor, ranks: Ranks) -> RewardScale:
    """Mean and (population) standard deviation of raw scores, over all rows of all ranks."""
    values = scores.double()
    count, total = ranks.sum([float(values.numel()), float(values.sum())])
    mean = total / count
    (squares,) = ranks.sum([float((values - mean).square().sum())])
    return RewardScale(mean=mean, std=math.sqrt(squares / count))
