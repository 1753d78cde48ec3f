"""The agent loop: tokens in, tokens out; limits, deadlines, failures, concurrency."""

import asyncio
import sys
import threading
import types

import pytest
from rlhf_core import (
    ConfigError,
    DroppedSample,
    Environment,
    LogProbMeaning,
    Observation,
    SamplingConfig,
    Trajectory,
)
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import (
    AgentConfig,
    AgentLoop,
    AgentTask,
    EnvironmentFailed,
    EnvironmentReward,
    EnvironmentTooSlow,
    SingleTurn,
    ToolEnvironment,
    tool_call_parser,
)

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def say(*turns: str):
    """A script that says these turns one after another, by the number of end-of-text tokens in the prompt."""

    def script(request, index):
        count = sum(token == EOS for token in request.prompt_token_ids)
        return (*ids(turns[min(count, len(turns) - 1)]), EOS)

    return script


class Echo:
    """Answers `<turn>!`, gives 1, 2, 3, ... and is done after `turns`."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    async def reset(self, metadata):
        return Observation(text=metadata.get("opening", ""))

    async def step(self, turn):
        return Observation(
            text=turn.text + "!",
            reward=turn.index + 1.0,
            done=turn.index + 1 == self.turns,
            info={"seen": turn.index},
        )


def loop_of(backend, environment, *, sampling=None, max_tokens=200, **changes) -> AgentLoop:
    return AgentLoop(
        backend,
        TOKENIZER,
        AgentConfig(environment=environment, **changes),
        sampling=sampling or SamplingConfig(max_tokens=16),
        max_tokens=max_tokens,
    )


def play(environment, *, script=None, backend=None, task=None, **changes) -> list[Trajectory | DroppedSample]:
    backend = backend or ScriptedBackend(script=script or say("a", "b", "c"))
    loop = loop_of(backend, environment, **changes)
    return asyncio.run(loop.run([task or AgentTask(group_id="g", prompt_token_ids=ids("go"), metadata={"k": 1})]))


# ------------------------------------------------------------ what an episode is


def test_turns_and_answers_in_one_row():
    (t,) = play(Echo)
    assert t.token_ids == (*ids("go"), *ids("a"), EOS, *ids("a!"), *ids("b"), EOS, *ids("b!"), *ids("c"), EOS)
    sampled = [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2
    assert list(t.response_mask) == sampled
    assert list(t.weight_versions) == [0 if s else -1 for s in sampled]
    assert list(t.rewards) == [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3]
    assert not t.truncated
    assert t.metadata == {"k": 1, "turns": 3, "ending": "done", "earned": 6.0, "environment": {"seen": 2}}


def test_every_turn_continues_from_the_very_tokens_before_it():
    # Byte tokens of an invalid sequence: decoding and tokenising again would change them.
    broken = (ids("é")[0], ids("é")[0], EOS)
    backend = ScriptedBackend(script=lambda request, index: broken)
    (t,) = play(lambda: Echo(2), backend=backend)
    first, second = backend.requests
    assert second.prompt_token_ids[: len(first.prompt_token_ids) + 3] == first.prompt_token_ids + broken
    assert t.token_ids == second.prompt_token_ids + broken
    assert ids(TOKENIZER.decode(broken)) != broken


def test_a_single_turn_is_one_request_for_all_samples():
    backend = ScriptedBackend(script=say("yes"))
    task = AgentTask(group_id="7/0", prompt_token_ids=ids("go"), episodes=3, seed=5)
    found = play(SingleTurn, backend=backend, task=task, max_turns=1)
    (request,) = backend.requests
    assert (request.n, request.seed, request.request_id) == (3, 5, "7/0")
    assert [t.sample_id for t in found] == ["7/0/0", "7/0/1", "7/0/2"]
    assert {t.token_ids for t in found} == {(*ids("go"), *ids("yes"), EOS)}
    assert not any(t.truncated or t.rewards for t in found)


def test_seeds_differ_by_episode_and_turn():
    backend = ScriptedBackend(script=say("a"))
    task = AgentTask(group_id="g", prompt_token_ids=ids("go"), episodes=3, seed=5)
    play(Echo, backend=backend, task=task)
    seeds = {(r.request_id): r.seed for r in backend.requests}
    assert len(set(seeds.values())) == 9
    assert [seeds[f"g/{i}/0"] for i in range(3)] == [5, 6, 7]


def test_messages_take_the_prompts_place_and_close_the_turn_once():
    class Chat:
        def reset(self, metadata):
            return Observation(messages=({"role": "user", "content": "hi"},))

        def step(self, turn):
            return Observation(messages=({"role": "user", "content": "more"},), done=turn.index == 1)

    (t,) = play(Chat, script=say("", "a", "", "b"))
    text = TOKENIZER.decode(t.token_ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )


def test_a_turn_that_another_token_ended_is_closed_by_the_template():
    stop = ids(".")[0]

    class Chat:
        def reset(self, metadata):
            return Observation()

        def step(self, turn):
            return Observation(messages=({"role": "user", "content": "x"},), done=turn.index == 1)

    (t,) = play(Chat, script=lambda request, index: (*ids("ok"), stop))
    assert TOKENIZER.decode(t.token_ids, skip_special_tokens=False).startswith(
        "gook.<|im_end|>\n<|im_start|>user\nx"
    )
    assert t.response_mask[5] is False  # the end of the turn that the policy did not say


def test_images_travel_with_requests_and_trajectories():
    class Gallery:
        def reset(self, metadata):
            return Observation(images=("second",))

        def step(self, turn):
            return Observation(text="x", images=("third",), done=turn.index == 1)

    backend = ScriptedBackend(script=say("a"))
    task = AgentTask(group_id="g", prompt_token_ids=ids("go"), images=("first",))
    (t,) = play(Gallery, backend=backend, task=task)
    assert [r.images for r in backend.requests] == [("first", "second"), ("first", "second", "third")]
    assert t.images == ("first", "second", "third")


def test_the_meaning_of_log_probs_is_kept():
    (t,) = play(Echo, sampling=SamplingConfig(max_tokens=4, temperature=0.5))
    assert t.meaning == LogProbMeaning(temperature=0.5)


def test_the_meaning_says_how_many_tokens_were_held_from_stopping_even_where_the_last_turn_had_less_room():
    (t,) = play(Echo, sampling=SamplingConfig(max_tokens=4, min_tokens=2), max_tokens=7)
    assert (t.metadata["ending"], t.meaning.min_tokens) == ("tokens", 2)


# ------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("changes", "ending", "turns"),
    [
        ({"max_turns": 2}, "turns", 2),
        ({"max_tokens": 7}, "tokens", 2),
        ({"sampling": SamplingConfig(max_tokens=1)}, "length", 1),
    ],
)
def test_limits_truncate(changes, ending, turns):
    (t,) = play(Echo, **changes)
    assert (t.truncated, t.metadata["ending"], t.metadata["turns"]) == (True, ending, turns)
    assert len(t.token_ids) <= changes.get("max_tokens", 200)
    # The turn at the limit has its reward all the same.
    assert sum(t.rewards) == sum(range(1, turns + 1))


def test_a_done_episode_whose_last_turn_was_cut_is_truncated():
    (t,) = play(SingleTurn, sampling=SamplingConfig(max_tokens=1))
    assert (t.truncated, t.metadata["ending"]) == (True, "done")


def test_an_aborted_turn_ends_the_episode_unjudged():
    class Never:
        def reset(self, metadata):
            return Observation()

        def step(self, turn):
            raise RuntimeError("an aborted turn was judged")

    async def run():
        backend = ScriptedBackend(script=say("a long turn"), token_delay_s=0.02)
        task = asyncio.ensure_future(
            loop_of(backend, Never).run([AgentTask(group_id="g", prompt_token_ids=ids("go"))])
        )
        await asyncio.sleep(0.1)
        await backend.pause("abort")
        return await task

    (t,) = asyncio.run(run())
    assert (t.truncated, t.metadata["ending"]) == (True, "abort")


# ------------------------------------------------------------ slow and broken environments


class Slow(Echo):
    """Never returns from its second step: in a thread or on the loop."""

    release = threading.Event()

    def step(self, turn):
        if turn.index == 1:
            self.release.wait(30)
        return Observation(text="!", reward=1.0)


class SlowAsync(Slow):
    async def step(self, turn):
        if turn.index == 1:
            await asyncio.sleep(30)
        return Observation(text="!", reward=1.0)


@pytest.mark.parametrize("environment", [Slow, SlowAsync])
def test_one_that_never_ends_is_cut_and_holds_nobody(environment):
    async def run():
        made = iter([environment, Echo, Echo])
        backend = ScriptedBackend(script=say("a", "b", "c"))
        loop = loop_of(backend, lambda: next(made)(), step_timeout_s=0.5, on_deadline="keep")
        order = []

        async def one(name):
            (t,) = await loop.run_group(AgentTask(group_id=name, prompt_token_ids=ids("go")))
            order.append(name)
            return t

        return await asyncio.gather(*map(one, ["slow", "x", "y"])), order

    (slow, *others), order = asyncio.run(run())
    Slow.release.set()
    Slow.release = threading.Event()
    assert order[-1] == "slow"
    assert [t.metadata["ending"] for t in others] == ["done", "done"]
    assert (slow.truncated, slow.metadata["ending"], slow.metadata["turns"]) == (True, "deadline", 2)
    assert sum(slow.rewards) == 1.0  # the turns before are kept with their rewards


def test_the_deadline_of_an_episode_ends_sampling_too():
    backend = ScriptedBackend(script=say("x" * 12), token_delay_s=0.2)
    (lost,) = play(Echo, backend=backend, episode_timeout_s=0.5)
    assert lost == DroppedSample(sample_id="g/0", reason="the episode did not end within 0.5 s")


class Stuck(Echo):
    async def reset(self, metadata):
        await asyncio.sleep(30)


class StuckConstructor(Echo):
    def __init__(self):
        threading.Event().wait(1)


@pytest.mark.parametrize("environment", [Stuck, StuckConstructor])
@pytest.mark.parametrize("on_deadline", ["drop", "retry", "keep"])
def test_a_missed_deadline_is_never_a_sample_of_nothing(environment, on_deadline):
    (lost,) = play(environment, step_timeout_s=0.1, on_deadline=on_deadline, attempts=2)
    assert isinstance(lost, DroppedSample)
    assert "did not return within 0.1 s" in lost.reason


def test_a_missed_deadline_may_end_the_run():
    with pytest.raises(EnvironmentTooSlow, match=r"sample 'g/0': .*Stuck.reset did not return within 0.1 s"):
        play(Stuck, step_timeout_s=0.1, on_deadline="raise")


class Broken(Echo):
    async def step(self, turn):
        raise TimeoutError("of its own")


def test_one_that_raises_stops_the_run_or_is_dropped_by_name():
    with pytest.raises(EnvironmentFailed, match=r"sample 'g/0'.*Broken.step raised TimeoutError: of its own"):
        play(Broken)
    (failed,) = play(Broken, on_error="drop")
    assert failed.sample_id == "g/0"
    assert "of its own" in failed.reason


def broken_constructor():
    raise RuntimeError("no world today")


class Ending(Echo):
    """Ends the process in its step: in a thread or on the loop."""

    def step(self, turn):
        sys.exit(3)


class EndingAsync(Echo):
    async def step(self, turn):
        sys.exit(3)


class Cancelling(Echo):
    async def step(self, turn):
        raise asyncio.CancelledError


class Stopping(Echo):
    def step(self, turn):
        raise StopIteration


class Answering(Echo):
    def __init__(self, observation):
        self.observation = observation

    def step(self, turn):
        return self.observation


def answering(**observation):
    return lambda: Answering(Observation(**observation))


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (broken_constructor, "broken_constructor raised RuntimeError: no world today"),
        (Ending, "raised SystemExit: 3"),
        (EndingAsync, "raised SystemExit: 3"),
        (Cancelling, "raised CancelledError"),
        (Stopping, "raised StopIteration"),
        (answering(messages=({"role": "user", "content": "x", "tool_calls": "x"},)), "cannot become tokens"),
        (answering(messages=(5,)), "cannot become tokens"),
        (answering(token_ids=(10**6,)), "cannot become tokens: an observation has the token id 1000000"),
        (answering(token_ids=(-1,)), "the token id -1"),
        (answering(token_ids=("x",)), "are no numbers"),
        (answering(text=5), "text is a int"),
        (answering(info={"steps": "many"}), "are no numbers"),
        (answering(info={"loss": float("nan")}), "log finite numbers"),
    ],
)
def test_whatever_fails_stops_the_run_or_is_dropped_by_name(environment, reason):
    with pytest.raises(EnvironmentFailed, match=f"sample 'g/0': .*{reason}"):
        play(environment)
    (lost,) = play(environment, on_error="drop")
    assert lost.sample_id == "g/0"
    assert reason in lost.reason


def test_a_parser_that_raises_is_a_failure_of_its_episode():
    def parse(text):
        raise KeyError(text)

    backend = ScriptedBackend(script=say("a"))
    config = AgentConfig(environment=Echo, on_error="drop")
    loop = AgentLoop(
        backend, TOKENIZER, config, sampling=SamplingConfig(max_tokens=4), max_tokens=50, parse_tool_calls=parse
    )
    (lost,) = asyncio.run(loop.run([AgentTask(group_id="g", prompt_token_ids=ids("go"))]))
    assert "reading the turn raised KeyError" in lost.reason


def test_one_that_fails_is_tried_again_with_other_seeds():
    failures = iter([True, True, False])

    class Flaky(Echo):
        def step(self, turn):
            if next(failures, False):
                raise RuntimeError("not today")
            return Observation(done=True)

    backend = ScriptedBackend(script=say("a"))
    task = AgentTask(group_id="g", prompt_token_ids=ids("go"), seed=5)
    (t,) = play(Flaky, backend=backend, task=task, on_error="retry")
    assert (t.sample_id, t.metadata["turns"]) == ("g/0", 1)
    assert len({request.seed for request in backend.requests}) == 3
    assert len({request.request_id for request in backend.requests}) == 3


def test_one_that_always_fails_is_dropped_after_all_attempts():
    backend = ScriptedBackend(script=say("a"))
    (lost,) = play(Broken, backend=backend, on_error="retry", attempts=2)
    assert "of its own" in lost.reason
    assert len(backend.requests) == 2


def test_a_tool_that_ends_its_program_is_told_to_the_policy():
    def leave() -> str:
        """Leave."""
        sys.exit(1)

    heard = []

    def script(request, index):
        heard.append(TOKENIZER.decode(request.prompt_token_ids))
        return (*ids("bye" if len(heard) > 1 else '<tool_call>{"name": "leave", "arguments": {}}</tool_call>'), EOS)

    loop = AgentLoop(
        ScriptedBackend(script=script),
        TOKENIZER,
        AgentConfig(environment=ToolEnvironment, environment_options={"tools": [leave]}),
        sampling=SamplingConfig(max_tokens=100),
        max_tokens=2000,
        parse_tool_calls=tool_call_parser(TOKENIZER, "tagged_json"),
    )
    (t,) = asyncio.run(loop.run([AgentTask(group_id="g", metadata={"prompt": "go"})]))
    assert "the tool ended its program" in heard[1]
    assert t.metadata["environment"] == {"tool_calls": 1, "tool_errors": 1}


@pytest.mark.parametrize(
    ("opens", "said", "calls"),
    [
        (False, "<think>{call}</think>{call}", 1),
        (False, "<think>{call}</think>bye", 0),
        (False, "<think>{call}", 0),
        (False, "{call}", 1),
        (True, "{call}</think>{call}", 1),
        (True, "{call}</think>bye", 0),
        (True, "{call}", 0),
    ],
)
def test_calls_that_are_only_thought_of_are_not_made(opens, said, calls):
    made = []

    def look() -> str:
        """Look."""
        made.append(1)
        return "seen"

    tokenizer = byte_tokenizer()
    ending = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}" if opens else ""
    tokenizer.chat_template += ending + "{# <think> </think> #}"
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    turns = [said.format(call=call), ("</think>" if opens else "") + "bye"]

    def script(request, index):
        text = turns[int(request.request_id.rpartition("/")[2])]
        return (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)

    loop = AgentLoop(
        ScriptedBackend(script=script),
        tokenizer,
        AgentConfig(environment=lambda: ToolEnvironment([look])),
        sampling=SamplingConfig(max_tokens=200),
        max_tokens=2000,
        parse_tool_calls=tool_call_parser(tokenizer, "tagged_json"),
    )
    (t,) = asyncio.run(loop.run([AgentTask(group_id="g", metadata={"prompt": "go"})]))
    assert (len(made), t.metadata["turns"]) == (calls, 1 + calls)


# ------------------------------------------------------------ observations that are too long


@pytest.mark.parametrize(
    "said",
    [
        {"text": "x" * 200_000},
        {"token_ids": ids("x") * 200_000},
        {"messages": ({"role": "tool", "content": "x" * 200_000},)},
    ],
)
def test_an_observation_is_cut_so_that_a_turn_fits_behind_it(said):
    class Long(Echo):
        def step(self, turn):
            return Observation(done=turn.index == 1, **said)

    (t,) = play(Long, max_tokens=300, sampling=SamplingConfig(max_tokens=16), script=say("a", "b"))
    assert len(t.token_ids) <= 300
    assert (t.metadata["turns"], t.metadata["ending"]) == (2, "done")
    assert t.metadata["environment"] == {"cut_observations": 1}
    assert t.token_ids.tolist().count(ids("x")[0]) > 150


def test_what_reset_says_is_cut_and_the_prompt_is_not():
    class Long(Echo):
        async def reset(self, metadata):
            return Observation(text="y" * 5000)

    (t,) = play(Long, max_tokens=40, sampling=SamplingConfig(max_tokens=8), script=say("a"))
    assert t.token_ids[:30] == (*ids("go"), *ids("y" * 28))
    with pytest.raises(EnvironmentFailed, match="the prompt has 50 tokens, which leaves no room"):
        play(Echo, max_tokens=40, task=AgentTask(group_id="g", prompt_token_ids=ids("x" * 50)))


def test_observations_have_a_limit_of_their_own():
    class Long(Echo):
        async def step(self, turn):
            return Observation(text="x" * 50, done=turn.index == 2)

    (t,) = play(Long, max_observation_tokens=5, script=say("a"))
    assert t.token_ids.tolist().count(ids("x")[0]) == 10
    assert t.metadata["environment"] == {"cut_observations": 2}


def test_tokenising_much_text_blocks_nobody():
    asleep = []

    class Words(Echo):
        async def step(self, turn):
            return Observation(text="word " * 200_000, done=turn.index == 1)

    async def run():
        async def tick():
            loop = asyncio.get_running_loop()
            while True:
                before = loop.time()
                await asyncio.sleep(0.005)
                asleep.append(loop.time() - before)

        ticking = asyncio.ensure_future(tick())
        found = await loop_of(ScriptedBackend(script=say("a")), Words, max_tokens=4_000).run(
            [AgentTask(group_id="g", prompt_token_ids=ids("go"))]
        )
        ticking.cancel()
        return found

    (t,) = asyncio.run(run())
    assert 3_000 < len(t.token_ids) <= 4_000
    assert max(asleep) < 0.5


def test_what_is_no_observation_is_a_failure():
    class Wrong(Echo):
        async def step(self, turn):
            return "well done"

    with pytest.raises(EnvironmentFailed, match="return an Observation"):
        play(Wrong)


def test_environments_are_closed_however_they_end():
    closed = []

    class Closing(Echo):
        def close(self):
            closed.append(self.turns)
            raise RuntimeError("costs no sample")

    class ClosingBroken(Broken):
        async def close(self):
            closed.append("broken")

    play(Closing)
    play(ClosingBroken, on_error="drop")
    assert closed == [3, "broken"]


def test_an_engine_that_dies_is_no_environments_fault():
    backend = ScriptedBackend()
    backend.die()
    with pytest.raises(Exception, match="killed by the test"):
        play(Echo, backend=backend, on_error="drop")


def test_at_most_so_many_episodes_at_once_over_several_event_loops():
    inside, most = 0, 0

    class Counting(Echo):
        async def step(self, turn):
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1
            return Observation(done=True)

    loop = loop_of(ScriptedBackend(script=say("a")), Counting, max_episodes=2)
    tasks = [AgentTask(group_id=str(i), prompt_token_ids=ids("go"), episodes=2) for i in range(4)]
    for _ in range(2):
        assert len(asyncio.run(loop.run(tasks))) == 8
    assert most == 2


def test_an_episode_with_nothing_to_start_from_is_refused():
    with pytest.raises(EnvironmentFailed, match="starts with nothing"):
        play(Echo, task=AgentTask(group_id="g"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_turns": 0}, "max_turns must be positive, got 0"),
        ({"step_timeout_s": 0}, "step_timeout_s must be positive"),
        ({"on_error": "ignore"}, "write raise, drop or retry"),
        ({"on_deadline": "ignore"}, "write raise, drop, retry or keep"),
        ({"attempts": 0}, "attempts must be positive"),
        ({"max_observation_tokens": 0}, "max_observation_tokens must be positive"),
        ({"isolate": "process"}, "isolate=process needs the environment's path"),
        ({"environment": ""}, "write module:Class"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        AgentConfig(**{"environment": Echo, **changes})
    with pytest.raises(ConfigError, match="max_tokens must be at least 1"):
        loop_of(ScriptedBackend(), Echo, max_tokens=0)


def test_an_environment_by_its_path_and_with_options(monkeypatch):
    monkeypatch.setitem(sys.modules, "echoes", types.SimpleNamespace(Echo=Echo))
    (t,) = play("echoes:Echo", environment_options={"turns": 2})
    assert (t.metadata["turns"], t.metadata["ending"]) == (2, "done")


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (Echo, {"turn": 2}, r"environment_options do not fit .*Echo.*: got an unexpected keyword argument 'turn'"),
        ("string:digits", {}, "environment 'string:digits' is a str; write a class"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_before_the_first_episode(environment, options, message):
    with pytest.raises(ConfigError, match=message):
        AgentConfig(environment=environment, environment_options=options).environment_maker()


def test_they_are_environments():
    assert isinstance(SingleTurn(), Environment)
    assert isinstance(Echo(), Environment)


def test_a_column_of_the_data_is_no_reward():
    (t,) = play(Echo, task=AgentTask(group_id="g", prompt_token_ids=ids("go"), metadata={"earned": 99}))
    (score,) = asyncio.run(EnvironmentReward().score([t], [""]))
    assert score.value == t.metadata["earned"] == 6.0
