"""LangChain's prebuilt agent, a graph of LangGraph, through the gateway: `nox -s agents` runs it."""

import asyncio
import os
import random
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
from rlhf_core import RolloutConfig, SamplingConfig
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer

INSTALLED = {found.name for found in distributions()}
EXAMPLES = Path(__file__).parents[4] / "examples" / "agents"
pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(
        not {"langchain", "langchain-openai"} <= INSTALLED, reason="langchain or langchain-openai is not installed"
    ),
]


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def call(left, right):
    arguments = f'{{"left":{left},  "right": {right}}}'  # spaces that no client would write
    return f'<tool_call>{{"name": "multiply", "arguments": {arguments}}}</tool_call><|im_end|>'


def played(answers, agent, context=8192):
    """An episode in which the model gives these answers, with what it was asked and the tokens it said."""
    from rlhf_rollout import AgentConfig, AgentTask, Gateway, GatewayConfig, ProgramLoop

    tokenizer = byte_tokenizer()
    said = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in answers]
    prompts = []

    def script(request, index):
        prompts.append(tuple(request.prompt_token_ids))
        return said[len(prompts) - 1]

    config = GatewayConfig(model="policy", max_model_len=context)
    with Gateway(ScriptedBackend(script=script), tokenizer, config) as gateway:
        loop = ProgramLoop(
            gateway, AgentConfig(**agent, max_turns=3), sampling=SamplingConfig(max_tokens=256), model="policy"
        )
        row = {"prompt": "6 * 7?", "answer": "42"}
        (episode,) = asyncio.run(loop.run_group(AgentTask(group_id="g", metadata=row)))
    return episode, prompts, said


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["42<|im_end|>"], 1.0),
        ([call(6, 7), "42<|im_end|>"], 1.0),
        ([call(1, 6), call(6, 7), "It is 42.<|im_end|>"], 0.0),
        ([call('"six"', 7), "<|im_end|>"], 0.0),  # the tool refuses it, and the agent says so to the model
        ([call(6, 7)] * 3, 0.0),  # it never ends: the quota of turns, or the graph's own limit
    ],
    ids=["at once", "one call", "two calls", "wrong call", "no end"],
)
def test_calls_and_answers_are_trained_as_they_were_sampled(answers, reward):
    episode, prompts, said = played(answers, {"program": "langgraph_agent:solve"})
    assert (episode.metadata["turns"], episode.metadata["earned"]) == (len(said), reward)
    tokens, mask = list(episode.token_ids), list(episode.response_mask)
    # One trajectory: each turn's prompt is how it begins, and what was sampled stands behind it, bit for bit.
    for prompt, turn in zip(prompts, said, strict=True):
        assert tokens[: len(prompt) + len(turn)] == [*prompt, *turn]
        assert not mask[len(prompt) - 1]
        assert all(mask[len(prompt) : len(prompt) + len(turn)])
    assert sum(mask) == sum(map(len, said))


def test_a_full_context_is_an_answer_that_is_wrong():
    episode, prompts, _ = played([call(6, 7)], {"program": "langgraph_agent:solve"}, context=120)
    assert (len(prompts), episode.metadata["turns"], episode.metadata["earned"]) == (1, 1, 0.0)


def test_it_runs_as_a_command_that_finds_the_model_in_its_environment():
    # A command has nothing of the run's environment, so what is imported from elsewhere is named here.
    command = (
        "env",
        f"PYTHONPATH={os.pathsep.join(sys.path)}",
        sys.executable,
        str(EXAMPLES / "langgraph_agent.py"),
    )
    answers = [call(6, 7), "42<|im_end|>"]
    episode, _, said = played(answers, {"command": command})
    assert (episode.metadata["turns"], episode.metadata["earned"]) == (2, 1.0)
    assert sum(episode.response_mask) == sum(map(len, said))


async def play(loop, tasks):
    groups = await asyncio.gather(*(loop.run_group(task) for task in tasks))
    return [episode for group in groups for episode in group]


def test_a_model_that_calls_has_the_log_probs_it_was_sampled_with(tmp_path):
    """A model that was shown calls, on the real backend: log-probs of all turns, computed again in one piece."""
    pytest.importorskip("rlhf_algos")
    import calculator
    from rlhf_rollout import AgentConfig, AgentTask, Gateway, GatewayConfig, ProgramLoop, TransformersBackend
    from transformers import AutoModelForCausalLM

    calculator.make_model(tmp_path / "random", seed=0)
    calculator.warm_up(tmp_path / "random", tmp_path / "warm", steps=40, seed=0, calling=0.75)
    backend = TransformersBackend(RolloutConfig(model=str(tmp_path / "warm"), max_model_len=64))
    draw = random.Random(0)
    try:
        with Gateway(backend, calculator.tokenizer(), GatewayConfig(model="policy", max_model_len=64)) as gateway:
            loop = ProgramLoop(
                gateway,
                AgentConfig(program="langgraph_agent:solve", max_turns=3),
                sampling=SamplingConfig(max_tokens=16),
                model="policy",
            )
            tasks = [AgentTask(group_id=str(i), metadata=calculator.problem(draw), episodes=4) for i in range(8)]
            episodes = asyncio.run(play(loop, tasks))
    finally:
        backend.close()
    assert max(episode.metadata["turns"] for episode in episodes) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "warm").eval()
    for episode in episodes:
        tokens = torch.tensor([list(episode.token_ids)])
        with torch.no_grad():
            log_probs = model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[0, :, 0]
        mask = torch.tensor(list(episode.response_mask))
        recorded = torch.tensor(list(episode.rollout_log_probs))
        assert (log_probs[mask[1:]] - recorded[mask]).abs().max() < 1e-4
