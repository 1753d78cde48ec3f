"""Tasks of the package `verifiers`, where it is installed: `nox -s agents` runs these tests against it."""

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from rlhf_core import ConfigError, DataError, SamplingConfig, Turn
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import AgentConfig, AgentLoop, AgentTask, VerifiersEnvironment, verifiers_rows

installed = pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed")


@pytest.fixture(autouse=True)
def published(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "published"))


def turn(text: str) -> Turn:
    return Turn(token_ids=(1,), text=text)


@installed
def test_a_data_set_becomes_rows():
    rows = verifiers_rows("sum_tasks", count=5, limit=2)
    assert [row["prompt"] for row in rows] == ["0 + 1?", "1 + 1?"]
    assert len(verifiers_rows("sum_tasks", count=5)) == 5


@installed
@pytest.mark.parametrize(("answer", "right"), [("2", 1.0), ("3", 0.0)])
def test_the_tasks_rewards_score_the_turn(answer, right):
    environment = VerifiersEnvironment("sum_tasks")
    said = environment.reset(verifiers_rows("sum_tasks")[1])
    assert [(m["role"], m["content"]) for m in said.messages] == [("system", "Add."), ("user", "1 + 1?")]
    said = asyncio.run(environment.step(turn(answer)))
    assert (said.reward, said.done) == (2 * right + 0.5, True)
    assert said.info == {"right": right, "asked": 0.5, "length": 1.0}


@installed
def test_episodes_in_the_agent_loop():
    tokenizer = byte_tokenizer()
    answer = [*tokenizer("2", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    config = AgentConfig(
        environment="rlhf_rollout:VerifiersEnvironment", environment_options={"taskset": "sum_tasks"}, max_turns=2
    )
    loop = AgentLoop(
        ScriptedBackend(script=lambda request, index: answer),
        tokenizer,
        config,
        sampling=SamplingConfig(max_tokens=8),
        max_tokens=4096,
    )
    tasks = [AgentTask(group_id=str(i), metadata=row) for i, row in enumerate(verifiers_rows("sum_tasks"))]
    assert [sum(trajectory.rewards) for trajectory in asyncio.run(loop.run(tasks))] == [0.5, 2.5, 0.5]


@installed
def test_what_cannot_be_played_is_refused():
    with pytest.raises(ConfigError, match="cannot load the task set 'no_tasks'"):
        VerifiersEnvironment("no_tasks")
    with pytest.raises(ConfigError, match="cannot load the task set 'sum_tasks'"):
        VerifiersEnvironment("sum_tasks", counts=3)
    with pytest.raises(DataError, match="no column `task`"):
        VerifiersEnvironment("sum_tasks").reset({"prompt": "1 + 1?"})


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match=r"install verifiers==0\.4"):
        VerifiersEnvironment("sum_tasks")
