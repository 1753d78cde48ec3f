"""Python functions as tools that the policy calls until it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core import ConfigError, Observation, ToolCall, Turn, load_object


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedTool:
    """A tool that is no Python function and brings its schema."""

    name: str
    schema: Mapping[str, Any]
    """As chat templates read it: {"type": "function", "function": {"name", "description", "parameters"}}."""
    call: Callable[..., Any]
    """Called with the arguments by name; an exception's text is what the policy reads."""


class ToolEnvironment:
    """Environment of a question and tools. A turn without a call is the answer and ends the episode.

    The tools' signatures and docstrings (Google style, as Transformers reads them) become the schemas that the chat
    template shows. Their results, and what went wrong with a call, come back as messages of the role `tool`.
    Numbers to log: `tool_calls`, `tool_errors`.

    >>> AgentConfig(environment=ToolEnvironment, environment_options={"tools": [multiply]})  # doctest: +SKIP
    """

    def __init__(
        self,
        tools: Sequence[str | Callable[..., Any] | DescribedTool],
        *,
        grade: str | Callable[[str, Mapping[str, Any]], float] | None = None,
        system: str | None = None,
        error_reward: float = 0.0,
        max_result_chars: int = 4096,
    ) -> None:
        """Import what is given as a path.

        Args:
            tools: functions, their `module:function` paths, or tools with schemas. They run in a thread, under the
                loop's `step_timeout_s`.
            grade: f(answer, metadata) -> the final reward, or its path; without it a reward function scores the
                episode.
            system: a system message.
            error_reward: reward of a turn for each call in it that could not be carried out.
            max_result_chars: longer results are cut.

        Raises:
            ConfigError: there is no tool.
            PluginError: a path cannot be imported.
        """
        if not tools:
            raise ConfigError("a tool environment needs at least one tool")
        found = [load_object(tool, what="tool") if isinstance(tool, str) else tool for tool in tools]
        self._tools = {tool.name: tool for tool in map(_described, found)}
        self._grade = load_object(grade, what="grade") if isinstance(grade, str) else grade
        self._system = system
        self._error_reward = error_reward
        self._max_result_chars = max_result_chars
        self._metadata: Mapping[str, Any] = {}
        self._calls = self._errors = 0

    def reset(self, metadata: Mapping[str, Any]) -> Observation:
        """See Environment. The question is the column `prompt`: text, or a list of chat messages."""
        self._metadata = metadata
        question = metadata.get("prompt", "")
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        return Observation(messages=tuple(messages), tools=tuple(_schema(tool) for tool in self._tools.values()))

    def step(self, turn: Turn) -> Observation:
        """See Environment."""
        if not turn.tool_calls:
            reward = self._grade(turn.text, self._metadata) if self._grade is not None else 0.0
            return Observation(reward=reward, done=True, info=self._info())
        messages, before = [], self._errors
        for call in turn.tool_calls:
            self._calls += 1
            messages.append({"role": "tool", "name": call.name, "content": self._run(call)})
        return Observation(
            messages=tuple(messages),
            reward=self._error_reward * (self._errors - before),
            info=self._info(),
        )

    def _run(self, call: ToolCall) -> str:
        try:
            if call.error:
                raise ValueError(call.error)
            if call.name not in self._tools:
                raise ValueError(f"there is no tool {call.name!r}; there are {', '.join(sorted(self._tools))}")
            return str(self._tools[call.name].call(**call.arguments))[: self._max_result_chars]
        except (Exception, SystemExit) as error:  # whatever it is, the policy is to read it and try otherwise
            self._errors += 1
            what = "the tool ended its program" if isinstance(error, SystemExit) else str(error)
            return f"error: {what}"[: self._max_result_chars]

    def _info(self) -> dict[str, float]:
        return {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}


def _described(tool: Any) -> DescribedTool:
    return tool if isinstance(tool, DescribedTool) else DescribedTool(name=tool.__name__, schema={}, call=tool)


def _schema(tool: DescribedTool) -> Mapping[str, Any]:
    """The tool's schema; that of a function is read when it is shown, from its signature and docstring."""
    if tool.schema:
        return tool.schema
    from transformers.utils import get_json_schema

    return get_json_schema(tool.call)
