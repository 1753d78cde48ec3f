"""What an agent loop plays: the environment and the limits of an episode, and a task with its episodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from rlhf_core import ConfigError, Environment, load_object


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Episodes of several turns in an environment: which environment, and the limits of an episode."""

    environment: str | Callable[..., Environment]
    """`module:Class` (see rlhf_core.Environment), or the class itself, or a function that makes one; called anew
    for every episode."""
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that call."""
    max_turns: int = 8
    """Turns that are sampled at most; an episode that is not done by then is truncated."""
    step_timeout_s: float = 30.0
    """Deadline of each `reset` and `step` of the environment."""
    episode_timeout_s: float = 600.0
    """Deadline of an episode, from its `reset`. A turn that is being sampled at that moment is not kept."""
    max_episodes: int = 1024
    """Episodes at the same time."""
    on_error: Literal["stop", "drop"] = "stop"
    """What happens when an environment raises: `stop` the run, or `drop` the sample by name. A late environment is
    no error: its episode ends there, truncated."""

    def __post_init__(self) -> None:
        if not self.environment:
            raise ConfigError("agent: environment is empty; write module:Class")
        for name in ("max_turns", "step_timeout_s", "episode_timeout_s", "max_episodes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"agent: {name} must be positive, got {getattr(self, name)}")
        if self.on_error not in ("stop", "drop"):
            raise ConfigError(f"agent: on_error={self.on_error!r} is unknown; write stop or drop")

    def environment_maker(self) -> Callable[[], Environment]:
        """A function without arguments that makes the environment of an episode.

        Raises:
            PluginError: `environment` cannot be imported.
            ConfigError: `environment` cannot be called, or not with `environment_options`.
        """
        made: Any = self.environment
        if isinstance(made, str):
            made = load_object(made, what="agent environment")
        if not callable(made):
            raise ConfigError(
                f"agent: environment {self.environment!r} is a {type(made).__name__}; write a class, or a function "
                "that makes an Environment"
            )
        try:
            inspect.signature(made).bind(**self.environment_options)
        except TypeError as error:
            raise ConfigError(f"agent: environment_options do not fit {self.environment!r}: {error}") from error
        except ValueError:  # a class of an extension module may have no signature
            pass
        return cast(Callable[[], Environment], partial(made, **self.environment_options))


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTask:
    """One row of data and the episodes that start from it."""

    group_id: str
    """Unique in the run; episode i is the sample `<group_id>/<i>`."""
    prompt_token_ids: Sequence[int] = ()
    """May be empty if the environment's `reset` says how the episode starts."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's columns, for the environment and for reward functions."""
    images: tuple[Any, ...] = ()
    """Images of the prompt."""
    episodes: int = 1
    seed: int | None = None
    """The first turn of episode i is drawn with seed + i, later ones with seeds made from that."""
