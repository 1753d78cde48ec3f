"""A prebuilt agent of LangChain, which is a graph of LangGraph, with a tool; it knows nothing of training.

`rollout.agent.program: langgraph_agent:solve` trains the model that it talks to; so does
`rollout.agent.command: [python, langgraph_agent.py]`, which finds the model in its environment variables. It needs
the packages `langchain` and `langchain-openai`.
"""

from __future__ import annotations

import asyncio
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient, PermissionDeniedError
from rlhf_rollout import ProgramTask

STEPS = 5
"""Nodes of the graph that are visited at most: model, tool, model, tool, model."""


@lru_cache(maxsize=1)
def connections(loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    """Shared by all episodes of an event loop: each ChatOpenAI would make its own, which takes 0.1 s."""
    return {"http_client": DefaultHttpxClient(), "http_async_client": DefaultAsyncHttpxClient()}


def multiply(left: int, right: int) -> int:
    """Multiply two numbers."""
    return left * right


async def answer(question: str, model: ChatOpenAI) -> str:
    """What the agent says in the end; empty if it finds no end."""
    agent = create_agent(model, [multiply])
    try:
        state = await agent.ainvoke({"messages": [("user", question)]}, {"recursion_limit": STEPS})
    except (GraphRecursionError, PermissionDeniedError, ContextOverflowError):
        # No end within STEPS, within the turns of the episode, or within the context of the model.
        return ""
    return str(state["messages"][-1].content)


async def solve(task: ProgramTask) -> float:
    """Have the agent answer the task; 1 if its answer is the row's `answer`."""
    model = ChatOpenAI(
        model=task.model,
        base_url=task.base_url,
        api_key=task.api_key,
        max_retries=0,
        **connections(asyncio.get_running_loop()),
    )
    said = await answer(task.prompt, model)
    return float(said.strip() == str(task.metadata["answer"]))


def main() -> None:
    """The same as a command: OPENAI_BASE_URL, OPENAI_API_KEY and RLHF_TASK say what there is to do."""
    task = json.loads(os.environ["RLHF_TASK"])
    said = asyncio.run(answer(task["prompt"], ChatOpenAI(model=task["model"], max_retries=0)))
    reward = float(said.strip() == str(task["metadata"]["answer"]))
    Path(task["result"]).write_text(json.dumps(reward))


if __name__ == "__main__":
    main()
