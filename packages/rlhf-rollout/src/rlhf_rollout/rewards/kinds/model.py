"""Kinds of rewards with a model on ranks of its own: the configuration alone; a launcher places the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core import ConfigError, DType

from rlhf_rollout.rewards.kind import Weighted
from rlhf_rollout.rewards.kinds.steps import StepRewardConfig


@dataclass(frozen=True, kw_only=True)
class OnRanks(Weighted):
    """What the kinds with a model of their own have. Not a part by itself."""

    __slots__ = ()

    path: str
    """A path is tried first, then a hub name."""
    ranks: int = 1
    """Ranks of its own."""
    engine: str | None = None
    """The policy's training engine if not given."""
    dtype: DType | None = None
    """The policy's if not given."""
    engine_options: Mapping[str, Any] | None = None
    """Settings of the engine; those of the policy if not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPart(OnRanks):
    """A reward model: sequence classification with one label. It reads the sampled tokens: same vocabulary."""

    kind: Literal["model"] = "model"

    def __post_init__(self) -> None:
        _check_ranks(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsPart(StepRewardConfig, OnRanks):
    """A process reward model, which judges every step of a response (see StepReward)."""

    kind: Literal["steps"] = "steps"

    def __post_init__(self) -> None:
        StepRewardConfig.__post_init__(self)
        _check_ranks(self)


def _check_ranks(part: OnRanks) -> None:
    if part.ranks < 1:
        raise ConfigError(f"reward model {part.path!r}: ranks must be at least 1, got {part.ranks}")
