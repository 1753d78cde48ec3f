"""An agent of the OpenAI Agents SDK, as its authors document it; it knows nothing of training.

`rollout.agent.program: openai_agents:play` trains the model that it talks to. It needs the package `openai-agents`.
"""

from __future__ import annotations

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from agents.exceptions import AgentsException
from openai import AsyncOpenAI
from rlhf_rollout import ProgramTask

TURNS = 4


async def play(task: ProgramTask) -> float:
    """Have an agent answer the task; 1 if its answer has the row's `answer` in it."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        model = OpenAIChatCompletionsModel(model=task.model, openai_client=client)
        agent = Agent(name="solver", instructions="Answer with a number.", model=model)
        try:
            # Traces would go to OpenAI's servers.
            result = await Runner.run(
                agent, task.prompt, max_turns=TURNS, run_config=RunConfig(tracing_disabled=True)
            )
        except AgentsException:  # too many turns, or output that the framework cannot read: the answer is wrong
            return 0.0
    return float(str(task.metadata["answer"]) in str(result.final_output))
