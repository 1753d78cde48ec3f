"""Paths of a configuration that mean the same in workers, which have another working directory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from rlhf_algos import absolute_path, with_absolute_paths
from rlhf_rollout import EngineRewardConfig

from rlhf_launch.config.reward import RewardSection

Config = TypeVar("Config")


def absolute(config: Config) -> Config:
    """A configuration of a run or of generation with absolute paths of its output and all models."""
    given: Any = with_absolute_paths(config)
    return given if given.reward is None else replace(given, reward=_absolute_reward(given.reward))


def _absolute_reward(reward: RewardSection) -> RewardSection:
    parts = {
        name: replace(part, path=absolute_path(part.path)) if isinstance(part, EngineRewardConfig) else part
        for name, part in reward.parts.items()
    }
    return replace(reward, parts=parts, model=None if reward.model is None else absolute_path(reward.model))
