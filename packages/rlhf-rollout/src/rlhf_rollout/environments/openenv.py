"""Environments that a server of OpenEnv plays."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_core import ConfigError, Observation, Turn, load_object

from rlhf_rollout.environments.optional import optional_module


class OpenEnvEnvironment:
    """Environment behind the address of an OpenEnv server (0.3); each episode has a session of its own there.

    The opening message is the row's `prompt` and the first observation; each turn becomes an action. A turn that
    `parse` refuses does not step the environment: the policy is told what was wrong. Where the row has a column
    `seed` and the environment's `reset` takes one, the episode starts with it. Numbers to log: `steps`,
    `unreadable_turns`.

    >>> AgentConfig(environment=OpenEnvEnvironment, environment_options={"base_url": "..."})  # doctest: +SKIP
    """

    def __init__(
        self,
        base_url: str,
        *,
        action: str = "message",
        parse: str | Callable[[str], Mapping[str, Any]] | None = None,
        write: str | Callable[[Mapping[str, Any]], str] | None = None,
        reset_options: Mapping[str, Any] | None = None,
        error_reward: float = 0.0,
        timeout_s: float = 60.0,
    ) -> None:
        """Keep where the server is; `reset` connects.

        Args:
            base_url: of a server that runs, `http://127.0.0.1:8000`.
            action: the field of the action that a turn's text fills, where there is no `parse`.
            parse: f(text of the turn) -> the action's fields, or its path; raises ValueError with what to tell the
                policy.
            write: f(fields of the observation) -> text, or its path. Without it, `openenv_text`.
            reset_options: further arguments of the environment's `reset`.
            error_reward: reward of a turn that `parse` refuses.
            timeout_s: of each answer of the server.

        Raises:
            ConfigError: OpenEnv is not installed, or `base_url` is no address.
            PluginError: a path cannot be imported.
        """
        core = optional_module("openenv.core", install="openenv-core==0.3.*", needed_by="OpenEnvEnvironment")
        if not base_url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(
                f"environment_options: base_url is {base_url!r}; write the address of a server, http://127.0.0.1:8000"
            )
        self._parse = load_object(parse, what="parse") if isinstance(parse, str) else parse
        self._write = load_object(write, what="write") if isinstance(write, str) else write or openenv_text
        self._action, self._error_reward = action, error_reward
        self._reset_options = dict(reset_options or {})
        self._info = {"steps": 0.0, "unreadable_turns": 0.0}
        self._client = core.GenericEnvClient(base_url, message_timeout_s=timeout_s).sync()

    def reset(self, metadata: Mapping[str, Any]) -> Observation:
        """See Environment. `prompt` (text or chat messages) and `seed` are read from the row."""
        seed = {} if metadata.get("seed") is None else {"seed": metadata["seed"]}
        result = self._client.reset(**self._reset_options, **seed)
        prompt, seen = metadata.get("prompt") or "", self._write(result.observation)
        if not isinstance(prompt, str):
            return Observation(messages=(*prompt, {"role": "user", "content": seen}))
        return Observation(messages=({"role": "user", "content": f"{prompt}\n\n{seen}".strip()},))

    def step(self, turn: Turn) -> Observation:
        """See Environment."""
        try:
            action = self._parse(turn.text) if self._parse else {self._action: turn.text}
        except ValueError as error:
            self._info["unreadable_turns"] += 1
            return self._said(str(error), reward=self._error_reward)
        result = self._client.step(dict(action))
        self._info["steps"] += 1
        return self._said(self._write(result.observation), reward=float(result.reward or 0), done=result.done)

    def close(self) -> None:
        """See Closable: end the session."""
        self._client.close()

    def _said(self, text: str, *, reward: float, done: bool = False) -> Observation:
        said = ({"role": "user", "content": text},)
        return Observation(messages=said, reward=reward, done=bool(done), info=dict(self._info))


def openenv_text(observation: Mapping[str, Any]) -> str:
    """The observation's text where that is its only field with something in it, else all such fields as JSON."""
    fields = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False)
