"""Sessions through the gateway: keys of their own, quotas, deadlines, expiry, closing during a turn."""

import asyncio
import threading
import time

import httpx
import openai
import pytest
from rlhf_core import ConfigError, SamplingConfig
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import Gateway, GatewayConfig

USER = {"role": "user", "content": "Guess a number."}
LETTERS = list(range(97, 107))


class Gate(ScriptedBackend):
    """A backend whose samples wait until the gate opens."""

    def __init__(self) -> None:
        super().__init__(script=lambda request, index: LETTERS)
        self.started, self.open, self.cancelled = threading.Event(), threading.Event(), threading.Event()

    async def generate(self, request):
        self.started.set()
        try:
            while not self.open.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await super().generate(request)


@pytest.fixture
def make():
    """A gateway over a scripted backend that says ten letters at once."""
    started = []

    def make(backend=None, **config):
        backend = backend or ScriptedBackend(script=lambda request, index: LETTERS)
        gateway = Gateway(backend, byte_tokenizer(), GatewayConfig(model="m", max_model_len=512, **config))
        gateway.start()
        started.append(gateway)
        return gateway

    yield make
    for gateway in started:
        gateway.close()


def ask(access, *, key=None, **options):
    with openai.OpenAI(base_url=access.url, api_key=key or access.api_key, max_retries=0) as agent:
        answer = agent.chat.completions.create(model="m", messages=[USER], **options)
        return list(answer) if options.get("stream") else answer


def asking(access, **options):
    """A thread that asks, and what it was answered."""
    answers = []

    def work():
        try:
            answers.append(ask(access, **options))
        except openai.APIStatusError as error:
            answers.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, answers


# ---------------------------------------------------------------- keys


def test_a_key_opens_its_own_session_alone_and_the_master_key_opens_all(make):
    gateway = make()
    mine, other = gateway.open_session("mine"), gateway.open_session("a/b c")
    assert mine.api_key not in (other.api_key, gateway.api_key)
    assert mine.api_key not in repr(mine)
    assert mine.url == mine.root_url + "/v1"
    for access, key in ((mine, None), (other, None), (mine, gateway.api_key)):
        ask(access, key=key)
    for access, key in ((mine, other.api_key), (other, "guess")):
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            ask(access, key=key)
    assert httpx.get(gateway.url + "/models", headers={"x-api-key": mine.api_key}).status_code == 401
    assert httpx.get(mine.url + "/models", headers={"x-api-key": mine.api_key}).status_code == 200
    assert [len(gateway.close_session(name)) for name in ("mine", "a/b c")] == [2, 1]


@pytest.mark.parametrize("name", ["", "a//b", "..", "a/./b", "a\nb"])
def test_a_name_that_a_url_changes_is_refused(make, name):
    with pytest.raises(ConfigError, match="cannot stand in a URL"):
        make().open_session(name)


# ---------------------------------------------------------------- limits


def test_a_session_has_sampling_of_its_own(make):
    backend = ScriptedBackend(script=lambda request, index: LETTERS)
    gateway = make(backend, sampling=SamplingConfig(max_tokens=9, temperature=0.5))
    ask(gateway.open_session("own", sampling=SamplingConfig(max_tokens=7, temperature=0.9)), temperature=0)
    ask(gateway.open_session("configured"))
    assert [(r.sampling.temperature, r.sampling.max_tokens) for r in backend.requests] == [(0.9, 7), (0.5, 9)]
    (trajectory,) = gateway.close_session("own")
    assert trajectory.meaning.temperature == 0.9


def test_turns_are_counted_by_choice(make):
    gateway = make()
    access = gateway.open_session("three", max_turns=3)
    ask(access, n=2)
    with pytest.raises(openai.PermissionDeniedError, match="may have 3 turns, and 2 are used"):
        ask(access, n=2)
    ask(access)
    with pytest.raises(openai.PermissionDeniedError):
        ask(access)
    assert len(gateway.close_session("three")) == 3


def test_a_turn_that_fails_is_not_counted(make):
    gateway = make()
    access = gateway.open_session("one", max_turns=1)
    with pytest.raises(openai.BadRequestError):
        ask(access, temperature=-1)
    ask(access)


def test_turns_are_cut_at_what_is_left_of_the_tokens(make):
    gateway = make()
    access = gateway.open_session("tokens", max_tokens=14)
    assert ask(access).usage.completion_tokens == 10
    assert ask(access, max_tokens=100).usage.completion_tokens == 4
    with pytest.raises(openai.PermissionDeniedError, match="may sample 14 tokens, and 14 are used"):
        ask(access)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_under_way_at_the_deadline_is_aborted_and_later_ones_are_refused(make, stream):
    backend = Gate()
    gateway = make(backend)
    # On a busy machine the first may be over before the turn begins.
    for number, deadline_s in enumerate((0.2, 2.0, 20.0)):
        access = gateway.open_session(f"late-{number}", deadline_s=deadline_s)
        with pytest.raises(openai.APIError) as refused:
            ask(access, stream=stream)
        if "past its deadline" not in str(refused.value):
            break
    assert f"reached its deadline of {deadline_s:g} s" in str(refused.value)
    assert backend.cancelled.wait(5)
    with pytest.raises(openai.PermissionDeniedError, match="past its deadline"):
        ask(access)
    assert gateway.close_session(access.session_id) == []


@pytest.mark.parametrize("limit", [{"max_turns": 0}, {"max_tokens": -1}, {"deadline_s": 0.0}])
def test_a_limit_that_allows_nothing_is_refused(make, limit):
    with pytest.raises(ConfigError, match="must be positive"):
        make().open_session("s", **limit)


def test_sessions_that_nobody_uses_make_room(make):
    gateway = make(max_sessions=2, session_idle_s=60)
    gateway.open_session("old")
    gateway._sessions.get("old").last_used -= 61
    used = gateway.open_session("used")
    gateway.open_session("third")
    with pytest.raises(ConfigError, match="2 sessions are open"):
        gateway.open_session("fourth")
    with pytest.raises(ConfigError, match="nobody used it for 60 s"):
        gateway.close_session("old")
    ask(used)


# ---------------------------------------------------------------- closing


@pytest.mark.parametrize("stream", [False, True])
def test_closing_waits_for_a_turn_under_way(make, stream):
    backend = Gate()
    gateway = make(backend)
    access = gateway.open_session("busy")
    thread, answers = asking(access, stream=stream)
    assert backend.started.wait(10)
    closed = []
    closing = threading.Thread(target=lambda: closed.extend(gateway.close_session("busy")))
    closing.start()
    while not gateway._sessions.get("busy").ending:
        time.sleep(0.001)
    with pytest.raises(openai.PermissionDeniedError, match="closed or closing"):
        ask(access)
    backend.open.set()
    closing.join()
    thread.join()
    assert answers
    assert [trajectory.response_length for trajectory in closed] == [10]


def test_closing_does_not_wait_for_ever(make):
    backend = Gate()
    gateway = make(backend, close_wait_s=0.05)
    thread, answers = asking(gateway.open_session("stuck"))
    assert backend.started.wait(10)
    assert gateway.close_session("stuck") == []
    thread.join()
    assert backend.cancelled.wait(5)
    assert "it was closed; the turn is aborted" in str(answers[0])


def test_dropping_ends_what_is_under_way(make):
    backend = Gate()
    gateway = make(backend)
    thread, answers = asking(gateway.open_session("dropped"))
    assert backend.started.wait(10)
    gateway.drop_session("dropped")
    thread.join()
    assert backend.cancelled.wait(5)
    assert isinstance(answers[0], openai.PermissionDeniedError)
    with pytest.raises(ConfigError, match="no open session"):
        gateway.close_session("dropped")


# ---------------------------------------------------------------- completions


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_recorded_and_continue_each_other_by_their_tokens(make, stream):
    gateway = make()
    access = gateway.open_session("plain")
    with openai.OpenAI(base_url=access.url, api_key=access.api_key, max_retries=0) as agent:

        def complete(prompt):
            answer = agent.completions.create(model="m", prompt=prompt, stream=stream, max_tokens=4)
            if stream:
                return [token for chunk in answer for token in getattr(chunk.choices[0], "token_ids", None) or []]
            return answer.choices[0].token_ids

        said = complete([1, 2])
        again = complete([1, 2, *said, 3])
        complete([9])
    one, other = gateway.close_session("plain")
    assert list(one.token_ids) == [1, 2, *said, 3, *again]
    assert list(one.response_mask) == [False] * 2 + [True] * 4 + [False] + [True] * 4
    assert (other.prompt_length, other.response_length) == (1, 4)
