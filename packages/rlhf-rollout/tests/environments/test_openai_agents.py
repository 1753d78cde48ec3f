"""An agent of the OpenAI Agents SDK through the gateway, over a real backend: `nox -s agents` runs it."""

import asyncio
from importlib.metadata import distributions
from pathlib import Path

import pytest
from rlhf_core import RolloutConfig, SamplingConfig
from rlhf_core.testing.tiny import save_tiny_model

INSTALLED = {found.name for found in distributions()}
EXAMPLES = Path(__file__).parents[4] / "examples" / "agents"
pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif("openai-agents" not in INSTALLED, reason="openai-agents is not installed"),
]


def test_its_turns_are_recorded_as_they_were_sampled(tmp_path, monkeypatch):
    from rlhf_rollout import AgentConfig, AgentTask, Gateway, GatewayConfig, ProgramLoop, TransformersBackend
    from transformers import AutoTokenizer

    monkeypatch.syspath_prepend(str(EXAMPLES))
    model = save_tiny_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    backend = TransformersBackend(RolloutConfig(model=model, max_model_len=512))
    gateway = Gateway(backend, tokenizer, GatewayConfig(model="tiny", max_model_len=512))
    gateway.start()
    try:
        config = AgentConfig(program="openai_agents:play")
        loop = ProgramLoop(gateway, config, sampling=SamplingConfig(max_tokens=12), model="tiny")
        row = {"prompt": "1 + 1?", "answer": ""}  # every answer has it
        (first, second) = asyncio.run(loop.run_group(AgentTask(group_id="g", metadata=row, episodes=2)))
    finally:
        gateway.close()
        backend.close()
    for trajectory in (first, second):
        text = tokenizer.decode(trajectory.token_ids)
        assert "Answer with a number." in text
        assert "1 + 1?" in text
        assert 1 <= sum(trajectory.response_mask) <= 12
    assert first.token_ids != second.token_ids
