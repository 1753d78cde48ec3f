"""What an agent loop plays: the environment and the limits of an episode, and a task with its episodes."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast, get_args

from rlhf_core import ConfigError, Environment, load_object

from rlhf_rollout.agents.containers import container_runtime

OnError = Literal["raise", "drop", "retry"]
OnDeadline = Literal["raise", "drop", "retry", "keep"]
_POSITIVE = (
    "max_turns",
    "max_sampled_tokens",
    "step_timeout_s",
    "episode_timeout_s",
    "max_observation_tokens",
    "max_episodes",
    "processes",
    "attempts",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Episodes of several turns, in an `environment` or of a `program` or a `command`: one of the three."""

    environment: str | Callable[..., Environment] | None = None
    """`module:Class` (see rlhf_core.Environment), or the class itself, or a function that makes one; called anew
    for every episode."""
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that call."""
    program: str | Callable[..., Any] | None = None
    """`module:function`, or the function itself, plain or async, called with a `ProgramTask` for every episode. It
    talks to the model through the gateway of the run, and returns its reward: None, a number, or a mapping of
    parts."""
    program_options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of that call."""
    command: tuple[str, ...] = ()
    """A program of any kind, started for every episode in a session of its own and killed at its end with all that
    it started. It finds the model and its task in its environment variables; see docs/agents.md."""
    container: str | None = None
    """Image in which the command runs, in a container of docker or podman with the host's network. It must be on
    the machine. None runs the command as a process."""
    max_sampled_tokens: int | None = None
    """Tokens that the model says in an episode of a program or a command at most; None sets no limit."""
    images: bool = False
    """Whether the messages of a program or a command may have images; the policy then is a vision-language
    model."""
    max_turns: int = 8
    """Turns that are sampled at most; an episode in an environment that is not done by then is truncated, and a
    program's further requests are refused."""
    step_timeout_s: float = 30.0
    """Deadline of each `reset` and `step` of the environment."""
    episode_timeout_s: float = 600.0
    """Deadline of an episode, from its `reset`. A turn that is being sampled at that moment is not kept."""
    max_observation_tokens: int | None = None
    """Tokens of an observation at most; None sets no other limit than the room. Whatever this says, an observation
    is cut so that a whole turn fits behind it, or so that it takes half of the room that is left."""
    max_episodes: int = 1024
    """Episodes at the same time."""
    isolate: Literal["none", "process"] = "none"
    """`process`: environments run in processes of their own, which are killed at a deadline with all they started.
    `environment` is then a path, and is imported in these processes alone."""
    processes: int = 8
    """Such processes at most, each with one episode at a time; further episodes wait for one."""
    on_error: OnError = "raise"
    """What happens when an environment fails, be it that its constructor, `reset` or `step` raises (or ends the
    process), or that it says what cannot become tokens: `raise` ends the run, `drop` leaves the sample out by name,
    `retry` plays the episode again with other seeds and leaves the sample out if no attempt succeeds."""
    on_deadline: OnDeadline = "drop"
    """The same for a missed deadline, of a step or of the episode. `keep` trains on the turns so far, truncated,
    with the rewards so far."""
    attempts: int = 3
    """How often an episode is played at most where `retry` is written."""

    def __post_init__(self) -> None:
        self._check_kind()
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"agent: {name} must be positive, got {value}")
        check_choice("on_error", self.on_error, OnError)
        check_choice("on_deadline", self.on_deadline, OnDeadline)
        check_choice("isolate", self.isolate, Literal["none", "process"])
        if self.isolate == "process" and not isinstance(self.environment, str):
            raise ConfigError(
                f"agent: isolate=process needs the environment's path, got {self.environment!r}; write module:Class"
            )

    def _check_kind(self) -> None:
        """Refuse several kinds of agents in one, and settings of another kind."""
        kinds = ("environment", "program", "command")
        given = [name for name in kinds if getattr(self, name) not in (None, ())]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ConfigError(f"agent: write one of environment, program and command; found {found}")
        (kind,) = given
        if not getattr(self, kind):
            raise ConfigError(f"agent: {kind} is empty; write module:Class")
        if kind == "command" and not all(isinstance(word, str) and "\0" not in word for word in self.command):
            raise ConfigError(f"agent: command must be a list of words, got {list(self.command)!r}")
        foreign = {
            "environment_options": kind != "environment" and bool(self.environment_options),
            "max_observation_tokens": kind != "environment" and self.max_observation_tokens is not None,
            "isolate": kind != "environment" and self.isolate != "none",
            "container": kind != "command" and self.container is not None,
            "program_options": kind != "program" and bool(self.program_options),
            "max_sampled_tokens": kind == "environment" and self.max_sampled_tokens is not None,
            "images": kind == "environment" and self.images,
        }
        if wrong := [name for name, is_foreign in foreign.items() if is_foreign]:
            raise ConfigError(f"agent: {wrong[0]} has no meaning beside {kind}; leave it out")
        if kind != "environment" and self.on_deadline == "keep":
            raise ConfigError(
                f"agent: on_deadline=keep has no meaning beside {kind}, whose reward comes at its end; write "
                "raise, drop or retry"
            )

    @property
    def uses_gateway(self) -> bool:
        """Whether episodes are those of a program or a command, which need the gateway of the run."""
        return self.environment is None

    def check(self) -> None:
        """Refuse what cannot be imported or called, before the first episode.

        Raises:
            PluginError: the environment or the program cannot be imported.
            ConfigError: it cannot be called as it will be, or there is no such command.
        """
        if self.environment is not None:
            if self.isolate == "none":
                self.environment_maker()
        elif self.program is not None:
            self.program_function()
        elif self.container is not None:
            container_runtime()
        elif shutil.which(self.command[0]) is None:
            raise ConfigError(f"agent: there is no command {self.command[0]!r} here; install it, or write its path")

    def program_function(self) -> Callable[[Any], Any]:
        """The program, to be called with a `ProgramTask`.

        Raises:
            PluginError: `program` cannot be imported.
            ConfigError: `program` cannot be called with a task and `program_options`.
        """
        found: Any = self.program
        if isinstance(found, str):
            found = load_object(found, what="agent program")
        if not callable(found):
            raise ConfigError(f"agent: program {self.program!r} is a {type(found).__name__}; write a function")
        _check_call(found, self.program_options, "program_options", self.program, first=(None,))
        return cast(Callable[[Any], Any], partial(found, **self.program_options))

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
        _check_call(made, self.environment_options, "environment_options", self.environment)
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
    messages: Sequence[Mapping[str, Any]] = ()
    """The prompt as chat messages, for programs; empty for a prompt that is plain text."""
    images: tuple[Any, ...] = ()
    """Images of the prompt."""
    episodes: int = 1
    seed: int | None = None
    """The first turn of episode i is drawn with seed + i, later ones with seeds made from that."""


def _check_call(
    function: Callable[..., Any], options: Mapping[str, Any], name: str, of: Any, *, first: tuple[Any, ...] = ()
) -> None:
    """Refuse keyword arguments that a function does not take."""
    try:
        inspect.signature(function).bind(*first, **options)
    except TypeError as error:
        raise ConfigError(f"agent: {name} do not fit {of!r}: {error}") from error
    except ValueError:  # a class of an extension module may have no signature
        pass


def check_choice(name: str, value: str, choices: Any) -> None:
    """Refuse a value of a setting that is none of a `Literal`'s.

    Raises:
        ConfigError: names the choices.
    """
    if value not in (known := get_args(choices)):
        raise ConfigError(f"agent: {name}={value!r} is unknown; write {', '.join(known[:-1])} or {known[-1]}")
