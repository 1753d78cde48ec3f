"""The `reward` section of a run's configuration: where scores come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlhf_core import ConfigError, RewardScale
from rlhf_rollout import (
    EngineRewardConfig,
    EnvironmentRewardConfig,
    FailureHandling,
    FunctionRewardConfig,
    ModelRewardConfig,
    RewardPart,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardNormalization:
    """By which numbers a part's scores are normalised: (score - mean) / std, before its weight."""

    short_form: ClassVar[str] = "source"

    source: Literal["measured", "given"] = "measured"
    """`measured`: once, before the first step, on answers of the policy as it begins, which is the reference where
    this has no path of its own; a resumed run keeps the numbers. `given`: by `mean` and `std`."""
    prompts: int = 256
    """Training prompts that are answered once each to measure (all, if there are fewer)."""
    mean: float | None = None
    """For `given`."""
    std: float | None = None
    """For `given`."""

    def __post_init__(self) -> None:
        given = (self.mean, self.std)
        if self.source == "given" and None in given:
            raise ConfigError("reward.normalize: source: given needs both mean and std")
        if self.source == "measured" and given != (None, None):
            raise ConfigError("reward.normalize: mean and std are measured; to give them write source: given")
        if self.prompts < 2:
            raise ConfigError(f"reward.normalize: prompts must be at least 2, got {self.prompts}")
        _ = self.given  # refuses numbers of no use

    @property
    def given(self) -> RewardScale | None:
        """The numbers, where they are given."""
        if self.mean is None or self.std is None:
            return None
        return RewardScale(mean=self.mean, std=self.std)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSection:
    """Where scores come from: the weighted sum of `parts`, each logged under its name.

    `function` and `model` are the short forms of a part with that name and kind. What the environment or program of
    `rollout.agent` gives is a part by itself, named `environment` unless a part of that kind has another name.
    """

    parts: Mapping[str, RewardPart] = field(default_factory=dict)
    """Name: {kind: function | http | judge | code | math | exact | fuzzy | regex | length | model | steps |
    generative | pairwise | environment, weight: 1.0, on_failure: ..., and what the kind has}."""
    function: str | None = None
    """`module:function`; called with `completions` and `prompts` and the data's other columns."""
    model: str | None = None
    """Sequence-classification model with one label."""
    timeout_s: float = 60.0
    """Deadline for `function` on the samples of one prompt."""
    on_failure: FailureHandling = field(default_factory=FailureHandling)
    """What happens when one fails: attempts, then `stop` the run or `drop` the samples at fault."""
    normalize: Mapping[str, RewardNormalization] = field(default_factory=dict)
    """Parts whose scores are normalised in training and its evaluations, by name (`{model: measured}`); what they
    were is logged as `reward/<part>/raw`. `rlhf generate` and `rlhf eval` give the scores as they are."""

    def __post_init__(self) -> None:
        for name in self.parts:
            if not name or "/" in name or "." in name:
                raise ConfigError(f"reward.parts: {name!r} is no name for a part; leave out '/' and '.'")
        for name, value in (("function", self.function), ("model", self.model)):
            if value is not None and name in self.parts:
                raise ConfigError(f"reward.{name} is the short form of reward.parts.{name}, which is there too")

    @property
    def given(self) -> bool:
        """Whether there is any part, that of an environment aside."""
        return bool(self.parts) or self.function is not None or self.model is not None

    def all_parts(self, *, environment: bool) -> dict[str, RewardPart]:
        """The parts by name, the short forms and that of an environment included.

        Raises:
            ConfigError: there is none, or one for an environment without an environment.
        """
        parts: dict[str, RewardPart] = {}
        if self.function is not None:
            parts["function"] = FunctionRewardConfig(function=self.function, timeout_s=self.timeout_s)
        if self.model is not None:
            parts["model"] = ModelRewardConfig(path=self.model)
        parts |= self.parts
        of_environment = [name for name, part in parts.items() if isinstance(part, EnvironmentRewardConfig)]
        if of_environment and not environment:
            raise ConfigError(f"reward.parts.{of_environment[0]}: there is no environment; set rollout.agent")
        if environment and not of_environment:
            parts["environment"] = EnvironmentRewardConfig()
        if not parts:
            raise ConfigError(
                "no reward: give reward.function ('module:function'), reward.model (a path), or reward.parts"
            )
        if unknown := sorted(set(self.normalize) - set(parts)):
            raise ConfigError(
                f"reward.normalize.{unknown[0]}: the reward has no part of this name; there are: {', '.join(parts)}"
            )
        return parts

    def engine_parts(self) -> dict[str, EngineRewardConfig]:
        """The parts that need an engine of their own, by name."""
        if not self.parts and self.model is None:
            return {}
        parts = self.all_parts(environment=True)
        return {name: part for name, part in parts.items() if isinstance(part, EngineRewardConfig)}
