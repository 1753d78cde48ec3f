"""An environment behind a server of OpenEnv, where it is installed: `nox -s agents` runs these tests against it."""

import asyncio
import random
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from rlhf_core import ConfigError, SamplingConfig, Turn
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import AgentConfig, AgentLoop, AgentTask, OpenEnvEnvironment

installed = [
    pytest.mark.stack,
    pytest.mark.skipif(find_spec("openenv") is None, reason="openenv-core is not installed"),
]
SECRET = random.Random(5).randint(1, 9)


def turn(text):
    return Turn(token_ids=(1,), text=text)


@pytest.fixture(scope="module")
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent / "published" / "guessing_server.py"
    process = subprocess.Popen([sys.executable, str(script), str(port)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class TestOnAServer:
    pytestmark = installed

    def test_an_episode_has_a_session_of_its_own(self, server):
        worlds = [OpenEnvEnvironment(server, reset_options={"tries": 2}) for _ in range(2)]
        try:
            for world in worlds:
                said = world.reset({"prompt": "Find it.", "seed": 5})
                assert said.messages == ({"role": "user", "content": "Find it.\n\nGuess."},)
            said = worlds[0].step(turn(str(SECRET)))
            assert (said.messages[0]["content"], said.reward, said.done) == ("right", 1.0, True)
            assert said.info == {"steps": 1.0, "unreadable_turns": 0.0}
            said = worlds[1].step(turn("0"))
            assert (said.messages[0]["content"], said.reward, said.done) == ("higher", 0.0, False)
            assert worlds[1].step(turn("99")).done  # its tries are spent
        finally:
            for world in worlds:
                world.close()

    def test_a_turn_that_cannot_be_read_does_not_step(self, server):
        def parse(text):
            return {"message": str(int(text))}

        world = OpenEnvEnvironment(server, parse=parse, write=lambda seen: seen["text"].upper(), error_reward=-0.5)
        try:
            said = world.reset({"prompt": ({"role": "system", "content": "Play."},), "seed": 5})
            assert [m["content"] for m in said.messages] == ["Play.", "GUESS."]
            said = world.step(turn("many"))
            assert "many" in said.messages[0]["content"]
            assert (said.reward, said.info["steps"], said.info["unreadable_turns"]) == (-0.5, 0.0, 1.0)
            assert world.step(turn(f" {SECRET} ")).reward == 1
        finally:
            world.close()

    def test_a_fault_of_the_server_is_a_fault_of_the_environment(self, server):
        world = OpenEnvEnvironment(server)
        try:
            world.reset({"prompt": ""})
            with pytest.raises(RuntimeError, match="the world broke"):
                world.step(turn("crash"))
        finally:
            world.close()

    def test_episodes_in_the_agent_loop(self, server):
        tokenizer = byte_tokenizer()

        def say(request, index):
            text = "1" if request.request_id.endswith("/0") else str(SECRET)
            return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

        config = AgentConfig(
            environment="rlhf_rollout:OpenEnvEnvironment", environment_options={"base_url": server}, max_episodes=4
        )
        loop = AgentLoop(
            ScriptedBackend(script=say), tokenizer, config, sampling=SamplingConfig(max_tokens=8), max_tokens=4096
        )
        task = AgentTask(group_id="guess", metadata={"prompt": "Find it.", "seed": 5}, episodes=8)
        for trajectory in asyncio.run(loop.run([task])):
            assert (trajectory.metadata["ending"], trajectory.metadata["turns"]) == ("done", 2)
            assert sum(trajectory.rewards) == 1

    def test_what_is_no_address_is_refused(self):
        with pytest.raises(ConfigError, match=r"base_url is 'echo-env'; write the address"):
            OpenEnvEnvironment("echo-env")


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ConfigError, match=r"install openenv-core==0\.3"):
        OpenEnvEnvironment("http://127.0.0.1:8000")
