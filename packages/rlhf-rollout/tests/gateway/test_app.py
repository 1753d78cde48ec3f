"""The gateway as agents see it: the official client, several turns, streams, mistakes, clients that go away."""

import asyncio
import itertools
import threading

import httpx
import openai
import pytest
import torch
from rlhf_core import (
    ConfigError,
    GenerationRequest,
    RolloutConfig,
    SamplingConfig,
)
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model
from rlhf_core.testing.weight_sync import Trainer
from rlhf_rollout import Gateway, GatewayConfig, TransformersBackend
from rlhf_rollout.gateway.apis.answers import TextPieces
from rlhf_rollout.gateway.stream import joined, sample_in_slices

USER = {"role": "user", "content": "Guess a number."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(path):
    backend = TransformersBackend(RolloutConfig(model=path, max_model_len=1024))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def gateway(backend, tokenizer):
    with Gateway(backend, tokenizer, GatewayConfig(model="policy", max_model_len=1024)) as gateway:
        yield gateway


@pytest.fixture
def serve(tokenizer):
    """A gateway over a scripted backend that says the given text."""
    started = []

    def serve(text, *, delay=0.0, **config):
        script = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

        def rest(request: GenerationRequest, index: int):
            """The script from where the prompt has got to: a slice continues the one before."""
            said = next((n for n in range(len(script), 0, -1) if request.prompt_token_ids[-n:] == script[:n]), 0)
            return script[said:]

        backend = ScriptedBackend(script=rest, token_delay_s=delay)
        gateway = Gateway(backend, tokenizer, GatewayConfig(model="m", max_model_len=4096, **config))
        gateway.start()
        started.append(gateway)
        return gateway, backend

    yield serve
    for gateway in started:
        gateway.close()


def client(gateway, access=None, **options):
    """A client of a session with its own key, or without a session with the master key."""
    url, key = (access.url, access.api_key) if access else (gateway.url, gateway.api_key)
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, **options)


# ---------------------------------------------------------------- several turns, recorded


def test_turns_are_continued_token_by_token_and_come_out_with_exact_log_probs(gateway, path):
    access = gateway.open_session("three-turns", group_id="task", metadata={"answer": "7"})
    messages, answers = [USER], []
    with client(gateway, access) as agent:
        for turn in range(3):
            answer = agent.chat.completions.create(
                model="policy", messages=messages, max_tokens=20, temperature=0.8, seed=turn, logprobs=True
            )
            answers.append(answer)
            messages = [*messages, answer.choices[0].message, {"role": "user", "content": f"No. {turn}"}]
    assert gateway.session("three-turns").misses == 0
    (trajectory,) = gateway.close_session("three-turns")
    said = [answer.choices[0].token_ids for answer in answers]
    sampled = [t for t, mask in zip(trajectory.token_ids, trajectory.response_mask, strict=True) if mask]
    assert sampled == [token for tokens in said for token in tokens]
    # Random bytes: their text would be other tokens if it were tokenised again.
    assert "\ufffd" in answers[0].choices[0].message.content
    for earlier, later in itertools.pairwise(answers):
        past = earlier.prompt_token_ids + earlier.choices[0].token_ids
        assert later.prompt_token_ids[: len(past)] == past
    logits = Trainer(path).logits(trajectory.token_ids)[:-1] / 0.8
    targets = torch.tensor(trajectory.token_ids[1:])
    expected = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    gap = (expected - torch.tensor(trajectory.rollout_log_probs[1:]))[torch.tensor(trajectory.response_mask[1:])]
    assert gap.abs().max() < 1e-4
    assert trajectory.meaning.temperature == 0.8
    assert trajectory.metadata == {"answer": "7"}
    content = answers[0].choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(
        [p for p, mask in zip(trajectory.rollout_log_probs, trajectory.response_mask, strict=True) if mask][:20]
    )


def test_several_choices_become_several_trajectories(gateway):
    access = gateway.open_session("choices")
    with client(gateway, access) as agent:
        answer = agent.chat.completions.create(model="policy", messages=[USER], max_tokens=5, n=3, seed=0)
        assert len(answer.choices) == 3
        assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)
    assert len(gateway.close_session("choices")) == 3


def test_a_streamed_turn_is_recorded_like_a_whole_one(serve, tokenizer):
    text = "Grüße, und 21 * 2 = 42!"
    gateway, backend = serve(text + "<|im_end|>", stream_tokens=4)
    access = gateway.open_session("stream")
    with client(gateway, access) as agent:
        stream = agent.chat.completions.create(
            model="m", messages=[USER], stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = list(stream)
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert "".join(filter(None, pieces)) == text
        assert len([piece for piece in pieces if piece]) > 3
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == len(text.encode()) + 1
        log_probs = [
            e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content
        ]
        assert len(log_probs) == len(text.encode()) + 1
        messages = [USER, {"role": "assistant", "content": text}, USER]
        again = agent.chat.completions.create(model="m", messages=messages, max_tokens=3)
        assert gateway.session("stream").misses == 0
    (trajectory,) = gateway.close_session("stream")
    assert trajectory.response_length == len(text.encode()) + 1 + 3
    assert backend.requests[-1].prompt_token_ids == tuple(again.prompt_token_ids)


def test_a_tool_call_goes_out_and_its_result_comes_back(serve):
    gateway, _ = serve('Adding.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>')
    access = gateway.open_session("tools")
    with client(gateway, access) as agent:
        for stream in (False, True):
            answer = agent.chat.completions.create(model="m", messages=[USER], tools=[TOOL], stream=stream)
            if stream:
                calls = [
                    c.choices[0].delta.tool_calls for c in answer if c.choices and c.choices[0].delta.tool_calls
                ]
                assert calls[0][0].function.name == "add"
                continue
            message = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls"
            assert (message.content, message.tool_calls[0].function.arguments) == ("Adding.", '{"a": 1}')
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
            agent.chat.completions.create(model="m", messages=[USER, message, result], tools=[TOOL])
            assert gateway.session("tools").misses == 0
    first, second = gateway.close_session("tools")
    assert first.response_length > second.response_length


def test_fixed_sampling_is_what_is_used_and_recorded(serve):
    gateway, backend = serve("abc<|im_end|>", sampling=SamplingConfig(max_tokens=50, temperature=0.9))
    access = gateway.open_session("fixed")
    with client(gateway, access) as agent:
        agent.chat.completions.create(model="m", messages=[USER], temperature=0, top_p=0.1, max_tokens=80)
        agent.chat.completions.create(model="m", messages=[USER], max_tokens=2)
    one, two = (request.sampling for request in backend.requests)
    assert (one.temperature, one.top_p, one.max_tokens) == (0.9, 1.0, 50)
    assert two.max_tokens == 2
    assert {t.meaning.temperature for t in gateway.close_session("fixed")} == {0.9}


# ---------------------------------------------------------------- other endpoints


def test_models_are_listed(gateway):
    with client(gateway) as agent:
        assert [model.id for model in agent.models.list()] == ["policy"]


def test_completions_take_token_ids_and_text(gateway, tokenizer):
    ids = tokenizer("abc")["input_ids"]
    with client(gateway) as agent:
        settings = {"model": "policy", "max_tokens": 6, "seed": 1, "logprobs": 1}
        by_ids = agent.completions.create(prompt=ids, **settings).choices[0]
        by_text = agent.completions.create(prompt="abc", **settings).choices[0]
        streamed = list(agent.completions.create(prompt=ids, stream=True, **settings))
    assert by_ids.token_ids == by_text.token_ids
    assert by_ids.prompt_token_ids == ids
    assert len(by_ids.logprobs.tokens) == len(by_ids.logprobs.token_logprobs) == len(by_ids.token_ids)
    assert "".join(chunk.choices[0].text for chunk in streamed) == by_ids.text


# ---------------------------------------------------------------- mistakes


def test_a_wrong_key_and_an_unknown_session_are_refused(gateway):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=gateway.url, api_key="guess").models.list()
    assert httpx.get(gateway.url + "/models").status_code == 401
    access = gateway.open_session("short-lived")
    gateway.close_session("short-lived")
    with client(gateway, access) as agent, pytest.raises(openai.AuthenticationError, match="no longer open"):
        agent.chat.completions.create(model="policy", messages=[USER])


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": ["hi"]}, "`role`"),
        ({"model": "gpt"}, "no model 'gpt'"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "`temperature` must be a number from 0 to 100"),
        ({"n": 0, "max_tokens": True}, "`max_tokens` must be a whole number"),
        ({"n": 5000}, "`n` must be a whole number from 1 to 1024"),
        ({"logit_bias": {"5": 1}}, "`logit_bias` is not supported"),
        ({"stop": [7]}, "`stop` must be"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "shorten the conversation"),
    ],
    ids=str,
)
def test_a_bad_request_is_answered_with_what_is_wrong(gateway, change, part):
    body = {"model": "policy", "messages": [USER]} | change
    headers = {"Authorization": f"Bearer {gateway.api_key}"}
    answer = httpx.post(gateway.url + "/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


def test_a_body_that_is_no_json_or_too_large_is_refused(serve):
    gateway, _ = serve("x", max_body_bytes=100)
    headers = {"Authorization": f"Bearer {gateway.api_key}"}
    for body, part in ((b"{", "not JSON"), (b"[]", "JSON object"), (b" " * 200, "larger than 100 bytes")):
        answer = httpx.post(gateway.url + "/completions", content=body, headers=headers)
        assert answer.status_code == 400
        assert part in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_backend_is_reported_to_the_client(serve, stream):
    gateway, backend = serve("x" * 100)
    backend.die("out of memory")
    with client(gateway) as agent, pytest.raises(openai.APIError, match="out of memory"):
        list(agent.chat.completions.create(model="m", messages=[USER], stream=stream))


def test_sessions_have_distinct_names(gateway):
    gateway.open_session("twice")
    with pytest.raises(ConfigError, match="open already"):
        gateway.open_session("twice")
    gateway.close_session("twice")
    with pytest.raises(ConfigError, match="no open session"):
        gateway.close_session("twice")


def test_a_port_in_use_is_named(gateway, backend, tokenizer):
    port = int(gateway.url.split(":")[2].split("/")[0])
    other = Gateway(backend, tokenizer, GatewayConfig(model="m", max_model_len=64, port=port))
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        other.start()


# ---------------------------------------------------------------- clients that go away


class Watched(ScriptedBackend):
    """Tells when a request is cancelled."""

    def __init__(self) -> None:
        super().__init__(script=lambda request, index: [9] * 10_000, token_delay_s=0.005)
        self.started, self.cancelled = threading.Event(), threading.Event()

    async def generate(self, request):
        self.started.set()
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_aborts_its_request(tokenizer, stream):
    backend = Watched()
    config = GatewayConfig(model="m", max_model_len=20_000, stream_tokens=0)
    with Gateway(backend, tokenizer, config) as gateway:
        access = gateway.open_session("gone")

        async def ask_and_leave():
            agent = openai.AsyncOpenAI(base_url=access.url, api_key=access.api_key, max_retries=0)

            async def ask():
                answer = await agent.chat.completions.create(model="m", messages=[USER], stream=stream)
                async for _ in answer:
                    pass

            task = asyncio.create_task(ask())
            await asyncio.to_thread(backend.started.wait, 20)
            task.cancel()
            await asyncio.wait({task})
            await agent.close()

        asyncio.run(ask_and_leave())
        assert backend.cancelled.wait(20)
        assert gateway.close_session("gone") == []


def test_a_client_that_disconnects_in_the_middle_of_a_stream_aborts_the_rest(tokenizer):
    backend = Watched()
    config = GatewayConfig(model="m", max_model_len=20_000, stream_tokens=4)
    with Gateway(backend, tokenizer, config) as gateway:
        access = gateway.open_session("gone")

        async def read_two_pieces_and_leave():
            agent = openai.AsyncOpenAI(base_url=access.url, api_key=access.api_key, max_retries=0)
            stream = await agent.chat.completions.create(model="m", messages=[USER], stream=True)
            pieces = [await anext(stream) for _ in range(2)]
            await stream.close()
            await agent.close()
            return pieces

        assert len(asyncio.run(read_two_pieces_and_leave())) == 2
        assert backend.cancelled.wait(20)
        # A turn of which the client saw a part only is no turn; what the backend still samples is nobody's.
        assert gateway.close_session("gone") == []


def test_closing_twice_does_no_harm_and_frees_the_port(serve):
    gateway, _ = serve("x")
    url = gateway.url
    gateway.close()
    gateway.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    with pytest.raises(ConfigError, match="does not listen"):
        gateway.open_session("late")


# ---------------------------------------------------------------- parts


def test_slices_add_up_to_the_sample_they_were_cut_from():
    backend = ScriptedBackend(script=lambda request, index: list(range(10 + len(request.prompt_token_ids), 30)))

    async def slices(**sampling):
        request = GenerationRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingConfig(**sampling))
        return [part.samples[0] async for part in sample_in_slices(backend, request, 4)]

    parts = asyncio.run(slices(max_tokens=10, min_tokens=6))
    assert [part.length for part in parts] == [4, 4, 2]
    assert [r.sampling.min_tokens for r in backend.requests] == [4, 2, 0]
    assert joined(parts).length == 10
    assert joined(parts).finish_reason == "length"
    assert joined(asyncio.run(slices(max_tokens=100))).finish_reason == "stop"


def test_a_streamed_turn_says_how_many_of_its_tokens_were_held_from_stopping(serve):
    gateway, _ = serve("a long answer", stream_tokens=4)
    access = gateway.open_session("held")
    with client(gateway, access) as agent:
        held = {"min_tokens": 6}
        list(agent.chat.completions.create(model="m", messages=[USER], stream=True, max_tokens=9, extra_body=held))
    (trajectory,) = gateway.close_session("held")
    assert trajectory.meaning.min_tokens == 6


def test_penalties_that_count_sampled_tokens_are_sampled_in_one_piece(serve):
    fixed = SamplingConfig(max_tokens=30, frequency_penalty=0.5)
    gateway, backend = serve("a long answer", stream_tokens=4, sampling=fixed)
    access = gateway.open_session("penalised")
    with client(gateway, access) as agent:
        list(agent.chat.completions.create(model="m", messages=[USER], stream=True))
    (trajectory,) = gateway.close_session("penalised")
    assert len(backend.requests) == 1
    assert trajectory.meaning.frequency_penalty == 0.5


def test_text_pieces_end_at_whole_characters(tokenizer):
    ids = tokenizer("aü€b")["input_ids"]
    pieces = TextPieces(lambda tokens: tokenizer.decode(tokens))
    assert [pieces.add([token]) for token in ids] == ["a", "", "ü", "", "", "€", "b"]
    assert pieces.finish("aü€b.") == "."
