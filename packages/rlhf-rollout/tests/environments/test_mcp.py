"""Tools of an MCP server, which is a process of its own and speaks the real protocol."""

import sys
from pathlib import Path

import pytest
from rlhf_core import ConfigError, ToolCall, Turn
from rlhf_rollout import MCPEnvironment

SERVER = {"command": sys.executable, "args": [str(Path(__file__).with_name("shop_server.py"))]}


def turn(*calls: ToolCall, text: str = "") -> Turn:
    return Turn(token_ids=(1,), text=text, tool_calls=calls)


def put(**arguments) -> ToolCall:
    return ToolCall(name="put", arguments=arguments)


@pytest.mark.stack
def test_an_episode_calls_the_tools_of_a_server_of_its_own():
    shops = [MCPEnvironment(**SERVER, grade="operator:eq", system="Shop.") for _ in range(2)]
    try:
        said = shops[0].reset({"prompt": "Buy."})
        assert [m["content"] for m in said.messages] == ["Shop.", "Buy."]
        shown = {tool["function"]["name"]: tool["function"] for tool in said.tools}
        assert set(shown) == {"put", "empty"}
        assert shown["put"]["description"] == "Put something into the basket."
        assert set(shown["put"]["parameters"]["properties"]) == {"item", "count"}
        said = shops[0].step(turn(put(item="tea", count=2), put(item="milk")))
        assert [m["content"] for m in said.messages] == ["2 in the basket", "3 in the basket"]
        said = shops[0].step(turn(put(item="gold"), put(count=1), ToolCall(name="steal")))
        texts = [m["content"] for m in said.messages]
        assert "gold is sold out" in texts[0]
        assert "item" in texts[1]
        assert texts[2] == "error: there is no tool 'steal'; there are empty, put"
        assert said.info == {"tool_calls": 5, "tool_errors": 3}
        shops[1].reset({"prompt": "Buy."})
        assert shops[1].step(turn(put(item="tea"))).messages[0]["content"] == "1 in the basket"  # another server
        assert shops[0].step(turn(text="done")).done
    finally:
        for shop in shops:
            shop.close()
            shop.close()


@pytest.mark.stack
def test_only_some_tools_are_shown():
    shop = MCPEnvironment(**SERVER, only=["empty"])
    try:
        (tool,) = shop.reset({"prompt": "Buy."}).tools
        assert tool["function"]["name"] == "empty"
    finally:
        shop.close()
    shop = MCPEnvironment(**SERVER, only=["sell"])
    try:
        with pytest.raises(ConfigError, match="no tool 'sell'; it has put, empty"):
            shop.reset({"prompt": "Buy."})
    finally:
        shop.close()


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"install rlhf-rollout\[mcp\]"):
        MCPEnvironment(**SERVER)
