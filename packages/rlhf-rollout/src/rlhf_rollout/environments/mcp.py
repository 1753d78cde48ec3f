"""Tools of a server that speaks the Model Context Protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from rlhf_core import ConfigError, Observation, Turn

from rlhf_rollout.agents.tool_environment import DescribedTool, ToolEnvironment
from rlhf_rollout.environments.optional import optional_module


class MCPEnvironment:
    """ToolEnvironment whose tools are those of an MCP server over stdio; needs the extra `mcp`.

    Each episode starts a server of its own and ends it, so that episodes share no state. The server is trusted: it
    runs as a process of this user.

    >>> AgentConfig(environment=MCPEnvironment, environment_options={"command": "my-server"})  # doctest: +SKIP
    """

    def __init__(
        self,
        command: str,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        only: Sequence[str] = (),
        grade: str | Callable[[str, Mapping[str, Any]], float] | None = None,
        **options: Any,
    ) -> None:
        """Keep what the server is started with; `reset` starts it.

        Args:
            command: program of the server.
            args: its arguments.
            env: variables for it, beside the few that the protocol's client passes on.
            only: names of the tools to show; all if empty.
            grade: see ToolEnvironment.
            options: further arguments of ToolEnvironment (`system`, `error_reward`, `max_result_chars`).

        Raises:
            ConfigError: `mcp` is not installed.
        """
        self._mcp = optional_module("mcp", install="rlhf-rollout[mcp]", needed_by="MCPEnvironment")
        self._server = self._mcp.StdioServerParameters(
            command=command, args=list(args), env=dict(env) if env else None
        )
        self._only, self._grade, self._options = tuple(only), grade, options
        self._running = ExitStack()
        self._tools: ToolEnvironment | None = None

    def reset(self, metadata: Mapping[str, Any]) -> Observation:
        """See Environment: start the server and show its tools.

        Raises:
            ConfigError: the server lacks a tool of `only`.
        """
        from anyio.from_thread import start_blocking_portal

        # The server's connection lives on an event loop in a thread of its own, as long as the episode.
        connection = self._mcp.Client(self._mcp.stdio_client(self._server))
        portal = self._running.enter_context(start_blocking_portal())
        client = self._running.enter_context(portal.wrap_async_context_manager(connection))
        found = {tool.name: tool for tool in portal.call(client.list_tools).tools}
        if missing := [name for name in self._only if name not in found]:
            raise ConfigError(
                f"environment_options: the MCP server has no tool {missing[0]!r}; it has {', '.join(found)}"
            )
        shown = [found[name] for name in self._only or found]

        def call(name: str, arguments: Mapping[str, Any]) -> str:
            return portal.call(_call, client, name, arguments)

        tools = [_described(tool, partial(call, tool.name)) for tool in shown]
        self._tools = ToolEnvironment(tools, grade=self._grade, **self._options)
        return self._tools.reset(metadata)

    def step(self, turn: Turn) -> Observation:
        """See Environment."""
        if self._tools is None:
            raise RuntimeError("step before reset")
        return self._tools.step(turn)

    def close(self) -> None:
        """See Closable: end the server."""
        self._running.close()


def _described(tool: Any, call: Callable[[Mapping[str, Any]], str]) -> DescribedTool:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    schema = {"type": "function", "function": function}
    return DescribedTool(name=tool.name, schema=schema, call=lambda **arguments: call(arguments))


async def _call(client: Any, name: str, arguments: Mapping[str, Any]) -> str:
    """The texts of a tool's result.

    Raises:
        ValueError: the tool failed; says why.
    """
    result = await client.call_tool(name, dict(arguments))
    text = "\n".join(part.text for part in result.content if part.type == "text")
    if result.is_error:
        raise ValueError(text or "the tool failed")
    return text
