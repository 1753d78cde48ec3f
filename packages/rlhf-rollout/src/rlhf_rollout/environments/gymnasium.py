"""Environments of Gymnasium, played in text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_core import ConfigError, Observation, Turn, load_object

from rlhf_rollout.environments.optional import optional_module


class GymnasiumEnvironment:
    """Environment that Gymnasium makes from an id; needs the extra `gymnasium`.

    The opening message is the row's `prompt` and the first observation; each turn is read as an action. A turn that
    has none does not step the environment: the policy is told what was wrong. Where the row has a column `seed`,
    the world is drawn with it, so that all episodes of the row start alike. Numbers to log: `steps`,
    `unreadable_turns`, `cut_off` (Gymnasium's own time limit).

    >>> AgentConfig(environment=GymnasiumEnvironment, environment_options={"id": "FrozenLake-v1"})  # doctest: +SKIP
    """

    def __init__(
        self,
        id: str,
        *,
        options: Mapping[str, Any] | None = None,
        parse: str | Callable[[str, Any], Any] | None = None,
        write: str | Callable[[Any, Any], str] | None = None,
        error_reward: float = 0.0,
    ) -> None:
        """Make the environment.

        Args:
            id: of `gymnasium.make`; `my_module:MyEnv-v0` imports the module that registers it.
            options: further arguments of `gymnasium.make`, `render_mode: ansi` for a picture in letters.
            parse: f(text of the turn, action space) -> action, or its path; raises ValueError with what to tell the
                policy. Without it, `gymnasium_action`.
            write: f(observation, environment) -> text, or its path. Without it, `gymnasium_text`.
            error_reward: reward of a turn without an action.

        Raises:
            ConfigError: Gymnasium is not installed, or cannot make this environment.
            PluginError: a path cannot be imported.
        """
        gymnasium = optional_module(
            "gymnasium", install="rlhf-rollout[gymnasium]", needed_by="GymnasiumEnvironment"
        )
        try:
            self._world = gymnasium.make(id, **(options or {}))
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(
                f"environment_options: Gymnasium cannot make {id!r} with {dict(options or {})}: {error}"
            ) from error
        self._parse = load_object(parse, what="parse") if isinstance(parse, str) else parse or gymnasium_action
        self._write = load_object(write, what="write") if isinstance(write, str) else write or gymnasium_text
        self._error_reward = error_reward
        self._info = {"steps": 0.0, "unreadable_turns": 0.0, "cut_off": 0.0}

    def reset(self, metadata: Mapping[str, Any]) -> Observation:
        """See Environment. `prompt` (text or chat messages) and `seed` are read from the row."""
        seen, _ = self._world.reset(seed=metadata.get("seed"))
        prompt, seen = metadata.get("prompt") or "", self._write(seen, self._world)
        if not isinstance(prompt, str):
            return Observation(messages=(*prompt, {"role": "user", "content": seen}))
        return Observation(messages=({"role": "user", "content": f"{prompt}\n\n{seen}".strip()},))

    def step(self, turn: Turn) -> Observation:
        """See Environment."""
        try:
            action = self._parse(turn.text, self._world.action_space)
        except ValueError as error:
            self._info["unreadable_turns"] += 1
            return self._said(str(error), reward=self._error_reward)
        seen, reward, ended, cut_off, _ = self._world.step(action)
        self._info["steps"] += 1
        self._info["cut_off"] = float(cut_off)
        return self._said(self._write(seen, self._world), reward=float(reward), done=bool(ended or cut_off))

    def close(self) -> None:
        """See Closable."""
        self._world.close()

    def _said(self, text: str, *, reward: float, done: bool = False) -> Observation:
        said = ({"role": "user", "content": text},)
        return Observation(messages=said, reward=reward, done=done, info=dict(self._info))


def gymnasium_action(text: str, space: Any) -> Any:
    """The action that a turn names: the last whole number in it, or its text where actions are texts.

    Raises:
        ValueError: the text has no number, or one that is no action; says which there are.
        ConfigError: the actions are neither numbers nor texts.
    """
    kind = type(space).__name__
    if kind == "Text":
        return text.strip()
    if kind != "Discrete":
        raise ConfigError(f"environment_options: actions of {space} are not read from text; write a `parse`")
    first, last = int(space.start), int(space.start + space.n) - 1
    found = re.findall(r"-?\d+", text)
    if not found or not first <= int(found[-1]) <= last:
        raise ValueError(f"Answer with a whole number from {first} to {last}.")
    return int(found[-1])


def gymnasium_text(observation: Any, environment: Any) -> str:
    """What the environment draws where its `render_mode` is `ansi`, else the observation as text."""
    return str(environment.render() if environment.render_mode == "ansi" else observation)
