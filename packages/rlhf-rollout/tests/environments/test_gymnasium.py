"""Environments of Gymnasium in the agent loop, against the package itself."""

import asyncio
import sys

import pytest
from rlhf_core import ConfigError, SamplingConfig, Turn
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import AgentConfig, AgentLoop, AgentTask, GymnasiumEnvironment, gymnasium_action

LAKE = {"id": "FrozenLake-v1", "options": {"is_slippery": False, "render_mode": "ansi"}}
TO_THE_GOAL = (1, 1, 2, 1, 2, 2)
"""Down twice, right, down, right twice, on the map of four by four."""


def turn(text: object) -> Turn:
    return Turn(token_ids=(1,), text=str(text))


def test_a_lake_is_crossed():
    lake = GymnasiumEnvironment(**LAKE)
    said = lake.reset({"prompt": "Cross the lake."})
    assert said.messages[0]["role"] == "user"
    assert said.messages[0]["content"].startswith("Cross the lake.\n\n")
    assert said.messages[0]["content"].count("H") == 4  # the holes of the map
    answers = [lake.step(turn(f"I go {action}")) for action in TO_THE_GOAL]
    assert [answer.reward for answer in answers] == [0, 0, 0, 0, 0, 1]
    assert [answer.done for answer in answers] == [False] * 5 + [True]
    assert answers[-1].info == {"steps": 6, "unreadable_turns": 0, "cut_off": 0}
    lake.close()


def test_a_turn_without_an_action_steps_nothing():
    lake = GymnasiumEnvironment(**LAKE, error_reward=-0.5)
    lake.reset({})
    for text in ("left", "4", "-1"):
        said = lake.step(turn(text))
        assert said.messages[0]["content"] == "Answer with a whole number from 0 to 3."
        assert (said.reward, said.done, said.info["steps"]) == (-0.5, False, 0)
    assert lake.step(turn(1)).info == {"steps": 1, "unreadable_turns": 3, "cut_off": 0}


def test_episodes_of_a_seed_start_alike():
    import gymnasium

    newest = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))

    def start(seed):
        return GymnasiumEnvironment(newest).reset({"seed": seed}).messages[0]["content"]

    assert start(3) == start(3)
    assert len({start(seed) for seed in range(5)}) > 1


def test_gymnasiums_time_limit_ends_an_episode():
    lake = GymnasiumEnvironment("FrozenLake-v1", options={"max_episode_steps": 2, "is_slippery": False})
    lake.reset({})
    assert not lake.step(turn(0)).done
    said = lake.step(turn(0))
    assert (said.done, said.info["cut_off"]) == (True, 1)


def direction(text, space):
    return ["left", "down", "right", "up"].index(text)


def square(observation, environment):
    return f"square {observation}"


def test_parser_and_writer_are_replaceable(monkeypatch):
    monkeypatch.setitem(sys.modules, "lake_words", sys.modules[__name__])
    lake = GymnasiumEnvironment(
        "FrozenLake-v1",
        options={"is_slippery": False},
        parse="lake_words:direction",
        write="lake_words:square",
    )
    assert lake.reset({}).messages[0]["content"] == "square 0"
    assert lake.step(turn("down")).messages[0]["content"] == "square 4"
    assert "not in list" in lake.step(turn("west")).messages[0]["content"]


def test_actions_are_read_by_their_space():
    from gymnasium.spaces import Box, Discrete, Text

    assert gymnasium_action("first 2, then 5", Discrete(3, start=3)) == 5
    assert gymnasium_action(" open door ", Text(20)) == "open door"
    with pytest.raises(ValueError, match="from 3 to 5"):
        gymnasium_action("2", Discrete(3, start=3))
    with pytest.raises(ConfigError, match="write a `parse`"):
        gymnasium_action("0.5", Box(0, 1))


@pytest.mark.parametrize("fields", [{"id": "NoLake-v1"}, {"id": "FrozenLake-v1", "options": {"wet": 1}}], ids=str)
def test_what_gymnasium_cannot_make_is_refused(fields):
    with pytest.raises(ConfigError, match="Gymnasium cannot make"):
        GymnasiumEnvironment(**fields)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"install rlhf-rollout\[gymnasium\]"):
        GymnasiumEnvironment("FrozenLake-v1")


def test_episodes_in_the_agent_loop():
    tokenizer = byte_tokenizer()

    def say(request, index):
        turns = int(request.request_id.rpartition("/")[2])
        return [*tokenizer(str(TO_THE_GOAL[turns]), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    config = AgentConfig(environment="rlhf_rollout:GymnasiumEnvironment", environment_options=LAKE, max_turns=8)
    loop = AgentLoop(
        ScriptedBackend(script=say), tokenizer, config, sampling=SamplingConfig(max_tokens=8), max_tokens=4096
    )
    task = AgentTask(group_id="lake", metadata={"prompt": "Cross."}, episodes=3)
    for trajectory in asyncio.run(loop.run([task])):
        assert (trajectory.metadata["ending"], trajectory.metadata["turns"]) == ("done", 6)
        assert sum(trajectory.rewards) == 1
