"""The `rollout` section of a run's configuration: how samples are generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_core import ConfigError, SamplingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSampling:
    """Replace groups whose scores are all equal by new prompts (DAPO)."""

    max_rounds: int = 4
    """Further rounds of prompts per step at most; a step that is still short trains on what it has."""
    oversample: float = 1.0
    """Prompts taken for each one missing; accepted groups beyond the step's size open the next step."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1 or self.oversample < 1:
            raise ConfigError(
                "rollout.dynamic_sampling: max_rounds and oversample must be at least 1, got "
                f"{self.max_rounds} and {self.oversample}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSection:
    """Episodes of several turns in an environment, in place of single responses."""

    environment: str
    """`module:Class`, made anew for every episode without arguments (see rlhf_core.Environment). Its rewards count
    towards the score."""
    max_turns: int = 8
    max_tokens: int = 4096
    """Tokens of an episode, prompt and environment included; `sampling.max_tokens` is a turn's."""
    step_timeout_s: float = 30.0
    """Deadline of each `reset` and `step`."""
    episode_timeout_s: float = 600.0
    on_error: Literal["stop", "drop"] = "stop"
    """What an environment that raises does: stop the run, or drop the sample by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSection:
    """How samples are generated."""

    backend: str = "auto"
    """`auto` (vllm where installed, else transformers), an installed backend's name, or `module:Class`."""
    engines: int = 1
    samples_per_prompt: int = 8
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=256))
    agent: AgentSection | None = None
    """Single responses if not given."""
    dynamic_sampling: DynamicSampling | None = None
    """Off if not given."""
    max_model_len: int = 0
    """Prompt plus response tokens; 0 means data.max_prompt_tokens + sampling.max_tokens."""
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the chosen backend."""

    def __post_init__(self) -> None:
        for name in ("engines", "samples_per_prompt"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name} must be at least 1, got {getattr(self, name)}")
