"""What an agent loop plays: the limits of an episode, and a task with its episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_core import ConfigError, SamplingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Limits of an episode."""

    sampling: SamplingConfig
    """Of every turn; `max_tokens` is a turn's."""
    max_turns: int = 8
    max_tokens: int = 4096
    """Tokens of an episode, prompt and environment included; at most the generator's `max_model_len`."""
    step_timeout_s: float = 30.0
    """Deadline of each `reset` and `step`."""
    episode_timeout_s: float = 600.0
    """Deadline of an episode, from its `reset`. A turn that is being sampled then is not kept."""
    max_episodes: int = 1024
    """Episodes at the same time."""
    on_error: Literal["stop", "drop"] = "stop"
    """What an environment that raises does: `stop` the run, or `drop` the sample by name. Being late is no error:
    the episode ends there, truncated."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "step_timeout_s", "episode_timeout_s", "max_episodes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"agent: {name} must be positive, got {getattr(self, name)}")
        if self.on_error not in ("stop", "drop"):
            raise ConfigError(f"agent: on_error={self.on_error!r} is unknown; write stop or drop")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTask:
    """One row of data and the episodes that start from it."""

    group_id: str
    """Unique in the run; episode i is the sample `<group_id>/<i>`."""
    prompt_token_ids: tuple[int, ...] = ()
    """May be empty if the environment's `reset` says how the episode starts."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's columns, for the environment and for reward functions."""
    images: tuple[Any, ...] = ()
    """Images of the prompt."""
    episodes: int = 1
    seed: int | None = None
    """The first turn of episode i is drawn with seed + i, later ones with seeds made from that."""
