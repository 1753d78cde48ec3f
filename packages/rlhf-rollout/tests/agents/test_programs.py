"""Episodes of programs: sessions become samples, whatever a program does hurts its own episode alone."""

import asyncio
import json
import os
import sys
import threading
import time

import pytest
from rlhf_core import ConfigError, DroppedSample, LogProbMeaning, PackedInts, Sample, SamplingConfig
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import (
    AgentConfig,
    AgentTask,
    EnvironmentFailed,
    EnvironmentReward,
    EnvironmentTooSlow,
    Gateway,
    GatewayConfig,
    ProgramLoop,
    RecordedSession,
    score_group,
)
from rlhf_rollout.gateway.sessions import TurnPrompt
from rlhf_rollout.sandbox.lifetime import in_own_process_namespace


class Access:
    def __init__(self, session_id):
        self.url, self.root_url = (
            f"http://gateway/sessions/{session_id}/v1",
            f"http://gateway/sessions/{session_id}",
        )
        self.api_key = f"key of {session_id}"


class Recorder:
    """Sessions without a server: what a program says is recorded by `say`."""

    def __init__(self):
        self.open, self.opened, self.dropped = {}, {}, []

    def open_session(self, session_id, *, group_id, metadata, **limits):
        assert session_id not in self.open
        self.opened[session_id] = limits
        self.open[session_id] = RecordedSession(session_id=session_id, group_id=group_id, metadata=metadata)
        return Access(session_id)

    def session(self, session_id):
        return self.open[session_id]

    def close_session(self, session_id):
        return self.open.pop(session_id).trajectories()

    def drop_session(self, session_id):
        if session_id not in self.open:
            raise ConfigError("gone")
        self.open.pop(session_id)
        self.dropped.append(session_id)

    def say(self, task, *, behind=None, words=2):
        """A turn of so many tokens, behind another one or at the start of a conversation."""
        session = task.base_url.split("/sessions/")[1].removesuffix("/v1")
        sample = Sample(
            token_ids=PackedInts.of((7,) * words),
            log_probs=(-0.5,) * words,
            weight_versions=(0,) * words,
            finish_reason="stop",
        )
        prompt = TurnPrompt(parent=behind, context=PackedInts.of((1, 2)))
        return self.open[session].record(prompt, sample, LogProbMeaning(), messages=None)


def run(program, *, recorder=None, task=None, needs_reward=False, **changes):
    recorder = recorder or Recorder()
    loop = ProgramLoop(
        recorder,
        AgentConfig(program=lambda given: program(recorder, given), **changes),
        sampling=SamplingConfig(max_tokens=8),
        model="policy",
        needs_reward=needs_reward,
    )
    found = asyncio.run(loop.run_group(task or AgentTask(group_id="7", metadata={"prompt": "hi", "answer": "42"})))
    assert not recorder.open
    return found


def decode(trajectories):
    return ["" for _ in trajectories]


def talk(recorder, task):
    first = recorder.say(task)
    recorder.say(task, behind=first)
    return 1.0


def test_a_session_becomes_the_sample_of_its_episode():
    seen = []

    def program(recorder, task):
        seen.append(task)
        return talk(recorder, task)

    messages = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "who?"})
    task = AgentTask(group_id="7", metadata={"prompt": "<|im|>who?", "answer": "42"}, messages=messages, episodes=2)
    recorder = Recorder()
    first, second = run(program, recorder=recorder, task=task, max_turns=5, max_sampled_tokens=100)
    assert (first.sample_id, first.episode_id, first.group_id) == ("7/0", "7/0", "7")
    assert second.sample_id == "7/1"
    assert list(first.response_mask) == [False, False, True, True] * 2
    assert first.metadata["earned"] == 1.0
    assert (first.metadata["turns"], first.metadata["answer"]) == (2, "42")
    given, _ = seen
    assert (given.prompt, given.messages, given.metadata) == ("who?", messages, {"answer": "42"})
    assert given.model == "policy"
    assert given.base_url == given.root_url + "/v1"
    assert "key" not in repr(given)
    limits = {"sampling": SamplingConfig(max_tokens=8), "max_turns": 5, "max_tokens": 100, "deadline_s": 600.0}
    assert recorder.opened == {"7/0": limits, "7/1": limits}


def test_branches_are_one_episode_with_one_score_and_rewards_at_their_turns():
    def program(recorder, task):
        first = recorder.say(task)
        recorder.say(task, behind=first)
        recorder.say(task)  # a conversation of its own, of a sub-agent
        return {"right": 1.0, "calls": [0.25, 0.0, 0.5]}

    samples = run(program)
    assert [t.sample_id for t in samples] == ["7/0/0", "7/0/1"]
    assert {t.episode_id for t in samples} == {"7/0"}
    assert [list(t.rewards) for t in samples] == [[0, 0, 0, 0.25, 0, 0, 0, 0], [0, 0, 0, 0.5]]
    group = asyncio.run(score_group(samples, EnvironmentReward(), decode))
    assert [s.value for s in group.scores] == [1.75, 1.75]
    assert group.scores[1].components == {"turns": 3.0, "right": 1.0, "calls": 0.75}


async def asynchronous(recorder, task):
    await asyncio.sleep(0)
    return talk(recorder, task)


@pytest.mark.parametrize(("answer", "value"), [(None, 0.0), (0.5, 0.5), (True, 1.0), ({"a": 1, "b": -0.5}, 0.5)])
def test_what_a_program_may_return(answer, value):
    (t,) = run(lambda recorder, task: (talk(recorder, task), answer)[1])
    group = asyncio.run(score_group([t], EnvironmentReward(), decode))
    assert group.scores[0].value == value


def test_a_program_may_be_asynchronous():
    (t,) = run(asynchronous)
    assert t.metadata["earned"] == 1.0


def fails(recorder, task):
    talk(recorder, task)
    raise ValueError("lost")


def leaves(recorder, task):
    talk(recorder, task)
    sys.exit(0)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (fails, "raised ValueError: lost"),
        (leaves, "raised SystemExit: 0"),
        (lambda recorder, task: 1.0, "asked the model for nothing"),
        (lambda recorder, task: (talk(recorder, task), "good")[1], "returned 'good' as a reward"),
        (lambda recorder, task: (talk(recorder, task), float("nan"))[1], "returned nan as a reward"),
        (lambda recorder, task: (talk(recorder, task), {"a": "b"})[1], "returned 'b' as the part 'a'"),
        (lambda recorder, task: (talk(recorder, task), {"a": [1, 2, 3]})[1], "rewards for 3 turns, and 2 were"),
    ],
)
def test_a_program_that_fails_ends_the_run_or_is_dropped_by_name(program, reason):
    with pytest.raises(EnvironmentFailed, match=f"sample '7/0': .*{reason}"):
        run(program)
    assert reason in run(program, on_error="drop")[0].reason


def test_without_any_reward_an_episode_has_failed_where_nothing_else_scores_it():
    (lost,) = run(lambda recorder, task: (talk(recorder, task), None)[1], needs_reward=True, on_error="drop")
    assert "returned no reward" in lost.reason


def test_a_program_is_tried_again_in_a_session_of_its_own():
    recorder, answers = Recorder(), iter([True, False])

    def program(recorder, task):
        talk(recorder, task)
        if next(answers):
            raise RuntimeError("not today")
        return 1

    (t,) = run(program, recorder=recorder, on_error="retry")
    assert (t.sample_id, recorder.dropped, list(recorder.opened)) == ("7/0", ["7/0"], ["7/0", "7/0/again1"])


def test_a_missed_deadline_is_dropped_or_ends_the_run_and_its_session():
    release, recorder = threading.Event(), Recorder()

    def hangs(recorder, task):
        talk(recorder, task)
        release.wait(10)

    (lost,) = run(hangs, recorder=recorder, episode_timeout_s=0.2)
    assert isinstance(lost, DroppedSample)
    assert "did not return within 0.2 s" in lost.reason
    assert recorder.dropped == ["7/0"]
    with pytest.raises(EnvironmentTooSlow, match="sample '7/0'"):
        run(hangs, episode_timeout_s=0.2, on_deadline="raise")
    release.set()


def test_at_most_so_many_programs_at_once():
    inside, most = 0, 0

    async def program(recorder, task):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return talk(recorder, task)

    run(program, task=AgentTask(group_id="7", episodes=6), max_episodes=2)
    assert most == 2


# ------------------------------------------------------------ commands

SCRIPT = """
import json, os, pathlib, subprocess, sys, time
task = json.loads(os.environ["RLHF_TASK"])
how = task["metadata"]["how"]
print("some words")
if how == "hang":
    beat = f"for n in $(seq 200); do echo >> {task['metadata']['note']}; sleep 0.05; done"
    subprocess.Popen(["sh", "-c", beat], start_new_session=True)
    time.sleep(60)
if how == "fail":
    sys.exit("no luck")
if how == "nonsense":
    pathlib.Path(task["result"]).write_text("{")
if how == "well":
    pathlib.Path(task["result"]).write_text(json.dumps({"names": sorted(os.environ), "task": task}))
"""


def command(how, *, timeout_s=20.0, image=None, **metadata):
    from rlhf_rollout.agents.commands import run_command

    task = {"metadata": {"how": how, **metadata}, "prompt": "hi"}
    variables = {"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": "u", "ANTHROPIC_API_KEY": "k", "ANTHROPIC_BASE_URL": "r"}
    words = [sys.executable, "-I", "-S", "-c", SCRIPT]
    return asyncio.run(run_command(words, variables, task, timeout_s=timeout_s, image=image))


def test_a_command_has_its_task_and_nothing_else_of_ours(monkeypatch):
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setenv("SECRET", "of the trainer")
    found = command("well")
    shown = {name for name in found["names"] if name not in ("PWD", "LC_CTYPE")}
    assert shown == {
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_BASE_URL",
        "HOME",
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "PATH",
        "RLHF_TASK",
    }
    assert found["task"]["prompt"] == "hi"
    assert not os.path.exists(found["task"]["result"])


def test_what_goes_wrong_with_a_command():
    assert command("silent") is None
    with pytest.raises(EnvironmentFailed, match=r"ended with code 1: no luck"):
        command("fail")
    with pytest.raises(EnvironmentFailed, match="result is not JSON"):
        command("nonsense")


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path):
    note = tmp_path / "beats"
    with pytest.raises(EnvironmentTooSlow, match=r"did not end within 0\.5 s"):
        command("hang", timeout_s=0.5, note=str(note))
    if in_own_process_namespace([]):  # elsewhere, what leaves its session lives on
        beats = note.stat().st_size
        time.sleep(0.3)
        assert note.stat().st_size == beats > 0


RUNTIME = """#!{python}
# Stands in for docker: runs the command of `run` with the variables that are named, and writes its words down.
import json, os, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
if words[0] == "run":
    if "my/image" not in words:
        os._exit(125)
    names = [words[at + 1] for at, word in enumerate(words) if word == "--env"]
    at = words.index("my/image")
    os.execve(words[at + 1], words[at + 1:], {{name: os.environ[name] for name in names}})
"""


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """What it was called with, call by call."""
    log, docker = tmp_path / "log", tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(RUNTIME.format(log=str(log), python=sys.executable))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_a_command_in_a_container_has_its_variables_and_a_folder_for_its_result(runtime):
    found = command("well", image="my/image")
    shown = {name for name in found["names"] if name not in ("PWD", "LC_CTYPE")}
    assert shown == {"ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL", "RLHF_TASK"}
    run, remove = runtime()
    folder = os.path.dirname(found["task"]["result"])
    for words in (
        ["--network", "host"],
        ["--pull", "never"],
        ["--mount", f"type=bind,source={folder},target={folder}"],
    ):
        at = run.index(words[0])
        assert run[at + 1] == words[1]
    assert not any(word == "k" or word.startswith("OPENAI_API_KEY=") for word in run), "no key on a command line"
    assert remove == ["rm", "--force", run[run.index("--name") + 1]]
    assert not os.path.exists(folder)


def test_a_container_that_hangs_or_does_not_start_is_removed(runtime, tmp_path):
    with pytest.raises(EnvironmentTooSlow):
        command("hang", timeout_s=0.5, image="my/image", note=str(tmp_path / "beats"))
    with pytest.raises(EnvironmentFailed, match="ended with code 125"):
        command("well", image="another/image")
    assert [call[0] for call in runtime()] == ["run", "rm", "run", "rm"]


def test_without_a_runtime_containers_are_refused_before_the_first_episode(monkeypatch):
    config = AgentConfig(command=("python", "x.py"), container="my/image")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="neither is installed here"):
        config.check()
    with pytest.raises(ConfigError, match="container has no meaning beside program"):
        AgentConfig(program="m:f", container="my/image")


CLIENT = """
import json, os, pathlib, urllib.request
task = json.loads(os.environ["RLHF_TASK"])
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps({"model": task["model"], "messages": task["messages"]}).encode(),
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
pathlib.Path(task["result"]).write_text(json.dumps({"right": said == task["metadata"]["answer"]}))
"""


def test_a_command_talks_to_the_gateway_with_what_it_finds_in_its_environment():
    tokenizer = byte_tokenizer()
    backend = ScriptedBackend(script=lambda request, index: tokenizer("42<|im_end|>")["input_ids"])
    config = AgentConfig(command=(sys.executable, "-I", "-S", "-c", CLIENT))
    with Gateway(backend, tokenizer, GatewayConfig(model="policy", max_model_len=500)) as gateway:
        loop = ProgramLoop(gateway, config, sampling=SamplingConfig(max_tokens=16), model="policy")
        task = AgentTask(group_id="7", metadata={"prompt": "6 * 7?", "answer": "42"})
        (found,) = asyncio.run(loop.run_group(task))
    assert (found.metadata["earned"], found.response_length) == (1.0, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "write one of environment, program and command; found none"),
        ({"program": print, "environment": print}, "found environment and program"),
        ({"program": ""}, "program is empty"),
        ({"command": ("x", 5)}, "command must be a list of words"),
        ({"program": print, "isolate": "process"}, "isolate has no meaning beside program"),
        ({"program": print, "max_observation_tokens": 5}, "max_observation_tokens has no meaning"),
        ({"command": ("x",), "program_options": {"a": 1}}, "program_options has no meaning beside command"),
        ({"environment": print, "max_sampled_tokens": 5}, "max_sampled_tokens has no meaning beside environment"),
        ({"program": print, "on_deadline": "keep"}, "on_deadline=keep has no meaning beside program"),
    ],
)
def test_nonsense_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        AgentConfig(**changes)


def test_what_cannot_be_called_is_refused_before_the_first_episode():
    def takes_nothing():
        return 1.0

    for changes, message in [
        ({"program": takes_nothing}, "program_options do not fit"),
        ({"program": lambda task: 1, "program_options": {"rounds": 1}}, "unexpected keyword argument 'rounds'"),
        ({"program": "string:digits"}, "is a str; write a function"),
        ({"command": ("no-such-program-here",)}, "there is no command 'no-such-program-here'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            AgentConfig(**changes).check()
