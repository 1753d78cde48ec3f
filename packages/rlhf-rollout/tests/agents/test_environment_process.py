"""Environments in processes of their own: they may end or hang, and hurt their own episode alone."""

import asyncio
import os

import pytest
from rlhf_core import DroppedSample, PluginError, SamplingConfig
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import AgentConfig, AgentLoop, AgentTask, check_agent

TOKENIZER = byte_tokenizer()
MODULE = """
import os, sys, time
from rlhf_core import Observation

class World:
    def __init__(self, turns=2):
        self.turns = turns

    async def reset(self, metadata):
        self.how = metadata["how"]
        return Observation(info={"pid": os.getpid()})

    def step(self, turn):
        print("to nobody")
        if self.how == "raise":
            raise RuntimeError("no")
        if self.how == "exit":
            sys.exit(1)
        if self.how == "die":
            os._exit(9)
        if self.how == "hang":
            time.sleep(60)
        if self.how == "secret":
            return Observation(info={"pid": os.getpid()}, images=(lambda: 1,))
        return Observation(text="on", reward=1.0, done=turn.index + 1 == self.turns, info={"pid": os.getpid()})
"""


def play(hows, **changes):
    backend = ScriptedBackend(script=lambda request, index: (65, TOKENIZER.eos_token_id))
    settings = {
        "environment": "isolated_world:World",
        "isolate": "process",
        "on_error": "drop",
        "step_timeout_s": 1.0,
        "processes": 1,
    }
    loop = AgentLoop(
        backend,
        TOKENIZER,
        AgentConfig(**{**settings, **changes}),
        sampling=SamplingConfig(max_tokens=4),
        max_tokens=50,
    )
    try:
        tasks = [AgentTask(group_id=how, prompt_token_ids=(1, 2), metadata={"how": how}) for how in hows]
        return asyncio.run(loop.run(tasks))
    finally:
        loop.close()


@pytest.fixture
def world(tmp_path, monkeypatch):
    (tmp_path / "isolated_world.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.stack
def test_whatever_an_environment_does_to_its_process_is_its_own_episodes_loss(world):
    hows = ["well", "raise", "exit", "secret", "well", "die", "hang", "well"]
    found = dict(enumerate(play(hows)))
    kept = [found.pop(place) for place in (0, 4, 7)]
    assert not any(isinstance(one, DroppedSample) for one in kept), kept
    assert [sum(t.rewards) for t in kept] == [2.0] * 3
    first, same, last = (t.metadata["environment"]["pid"] for t in kept)
    assert first == same  # a process is used again
    assert os.getpid() not in (first, last)
    assert all(isinstance(one, DroppedSample) for one in found.values())
    reasons = {hows[place]: one.reason for place, one in found.items()}
    assert reasons["raise"] == "World.step raised RuntimeError: no"
    assert reasons["exit"] == "World.step raised SystemExit: 1"
    assert "pickle cannot write" in reasons["secret"]
    assert "lost its process (exit 9)" in reasons["die"]
    assert "did not return within 1 s" in reasons["hang"]


@pytest.mark.stack
def test_what_cannot_be_made_is_refused_before_the_first_episode(world):
    config = AgentConfig(environment="isolated_world:World", isolate="process", environment_options={"rounds": 2})
    with pytest.raises(PluginError, match="environment_options do not fit"):
        check_agent(config)
