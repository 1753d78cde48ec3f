"""A server of the Model Context Protocol, with a state, for the tests."""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
basket = []


@server.tool()
def put(item: str, count: int = 1) -> str:
    """Put something into the basket."""
    if item == "gold":
        raise ToolError("gold is sold out")
    basket.extend([item] * count)
    return f"{len(basket)} in the basket"


@server.tool()
def empty() -> str:
    """Empty the basket."""
    basket.clear()
    return "empty"


if __name__ == "__main__":
    server.run("stdio")
