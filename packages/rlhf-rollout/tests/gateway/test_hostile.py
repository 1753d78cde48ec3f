"""Requests meant to break the gateway, its backend or its sessions: each is told what is wrong with it."""

import json
import socket

import httpx
import pytest
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import Gateway, GatewayConfig

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WORDS = "hello<|im_end|>"


@pytest.fixture(scope="module")
def backend():
    script = byte_tokenizer()(WORDS, add_special_tokens=False)["input_ids"]
    return ScriptedBackend(script=lambda request, index: script)


@pytest.fixture(scope="module")
def gateway(backend):
    config = GatewayConfig(model="m", max_model_len=4096, request_s=0.5, max_body_bytes=1 << 20)
    with Gateway(backend, byte_tokenizer(), config) as gateway:
        yield gateway


@pytest.fixture
def post(gateway):
    def post(body, path="/chat/completions"):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {gateway.api_key}"}
        return httpx.post(gateway.url + path, content=body, headers=headers)

    return post


def chat(**change):
    return {"model": "m", "messages": [USER]} | change


def saying(**message):
    return chat(messages=[{"role": "user"} | message])


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (chat(top_k=1e20), "`top_k` must be a whole number"),
        (chat(top_k=10**20), "`top_k` must be a whole number"),
        (chat(temperature=1e-40), "0 (greedy) or at least 0.01"),
        (chat(temperature=float("nan")), "NaN is no number of JSON"),
        (chat(temperature=float("inf")), "Infinity is no number of JSON"),
        (b'{"model": "m", "messages": [], "temperature": 1e999}', "at least one message"),
        (b'{"model": "m", "messages": [{"role": "user"}], "temperature": 1e999}', "from 0 to 100, got inf"),
        (chat(top_p=0), "`top_p` must be a number"),
        (chat(repetition_penalty=0), "`repetition_penalty` must be a number from 0.01"),
        (chat(presence_penalty=-3), "`presence_penalty` must be a number from -2"),
        (chat(frequency_penalty="x"), "`frequency_penalty` must be a number"),
        (chat(min_p=1), "`min_p` must be a number"),
        (chat(seed=1 << 64), "`seed` must be a whole number"),
        (chat(seed=-1), "`seed` must be a whole number"),
        (chat(min_tokens=9, max_tokens=3), "at most max_tokens=3"),
        (b'{"model": "m", "n": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
        (b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"model": "m", "metadata": ' + b"[" * 80 + b"]" * 80 + b"}", "nested more than 64 deep"),
        (b"\xff\xfe", "not JSON"),
        (chat(model=["m"]), "there is no model"),
        (chat(messages=[USER] * 5000), "`messages` may have 4096 messages"),
        (saying(content=5), "only text"),
        (saying(content=[{"type": "text"}]), "each with its `text`"),
        (saying(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "only text"),
        (saying(content="x", role="wizard"), "`role` must be one of"),
        (saying(content="x", name=5), "`name` must be a text"),
        (saying(content="x", audio={"id": "1"}), "`audio` is not supported"),
        (saying(role="assistant", tool_calls="x"), "`tool_calls` must be a list"),
        (saying(role="assistant", tool_calls=["x"]), "each of `tool_calls`"),
        (saying(role="assistant", tool_calls=[{"function": {"name": 5}}]), "each of `tool_calls`"),
        (saying(role="user", tool_calls=[CALL]), "in a message of the assistant"),
        (chat(stop=5), "`stop` must be"),
        (chat(stop=[""]), "`stop` must be"),
        (chat(stop_token_ids=[1 << 40]), "`stop_token_ids` must be token ids from 0 to"),
        (chat(tools=5), "`tools` must be a list"),
        (chat(tools=[5]), "each of `tools`"),
        (chat(tools=[{"type": "function", "function": {"name": "f", "parameters": 5}}]), "each of `tools`"),
        (chat(tools=[{"type": "function", "function": {"name": "f", "strict": 5}}]), "`strict`"),
        (chat(chat_template_kwargs=5), "`chat_template_kwargs` must be an object"),
        (chat(chat_template_kwargs={"tokenize": True}), "cannot set tokenize"),
        (chat(stream_options=5), "`stream_options`"),
        (chat(stream="yes"), "`stream` must be true or false"),
    ],
    ids=lambda value: str(value)[:60] if not isinstance(value, bytes) else value[:20].decode("latin1"),
)
def test_what_cannot_be_answered_is_refused_with_what_is_wrong(post, body, part):
    answer = post(body)
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("parallel_tool_calls", False),
        ("logit_bias", {"5": 1}),
        ("guided_json", {"type": "object"}),
        ("structured_outputs", {"json": {}}),
        ("output_config", {"effort": "high"}),
        ("bad_words", ["no"]),
        ("ignore_eos", True),
        ("top_logprobs", 5),
        ("reasoning_effort", "high"),
        ("functions", []),
        ("store", True),
        ("echo", 1),
        ("anything", "at all"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(post, name, value):
    answer = post(chat(**{name: value}))
    assert answer.status_code == 400
    assert f"`{name}` is not supported" in answer.json()["error"]["message"]


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("json_object", "`response_format` can be"),
        ({"type": "json_schema"}, "`response_format` can be"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, "`response_format` can be"),
        ({"type": "grammar", "grammar": "root ::= x"}, "`response_format` can be"),
        # what an engine would compile for minutes, or to gigabytes
        ({"type": "string", "pattern": "(a{1,9999}){1,9999}"}, "`response_format`: a schema takes no pattern"),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}, "takes no maxItems"),
        (deep(40), "32 levels"),
        (deep(300), "more than 64 deep"),
        ({"enum": ["x" * 100] * 300}, "16384 characters"),
        ({"type": "colour"}, "there is no type 'colour'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_form_of_answers_that_an_engine_could_choke_on_is_refused(post, form, part):
    if isinstance(form, dict) and "json_schema" not in (form.get("type"), *form) and form.get("type") != "grammar":
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": form}}
    answer = post(chat(response_format=form))
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]


def test_what_is_the_case_anyway_may_be_written(post):
    as_it_is = {
        "tool_choice": "auto",
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "response_format": {"type": "text"},
        "top_logprobs": 0,
        "stop": None,
        "anything": None,
        "user": "me",
    }
    answer = post(chat(**as_it_is))
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("prompt", [5, [], [[1], [2]], ["a", "b"], [1, "a"], [-1], [1 << 40], [1] * 5000, {"a": 1}])
def test_a_prompt_that_an_engine_could_die_of_is_refused(post, prompt):
    answer = post({"model": "m", "prompt": prompt}, "/completions")
    assert answer.status_code == 400
    assert "`prompt`" in answer.json()["error"]["message"]


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenised(post):
    answer = post(saying(content="x" * 900_000))
    assert answer.status_code == 400
    assert "the prompt has 900" in answer.json()["error"]["message"]


def test_a_request_that_is_half_sent_ends(gateway):
    host, port = gateway.url.removeprefix("http://").split("/")[0].split(":")
    whole_head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {gateway.api_key}\r\nContent-Length: 99\r\n\r\n"
    )
    for sent, answered in (("", b""), ("POST /v1/comp", b""), (whole_head + "{", b"did not arrive within 0.5 s")):
        # A connection that is left open ends in a timeout of the test's own, which is an error.
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(sent.encode())
            received = b""
            while part := connection.recv(4096):
                received += part
                if answered and answered in received:
                    break
            assert answered in received


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_fault(gateway, post, caplog):
    host, port = gateway.url.removeprefix("http://").split("/")[0].split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {gateway.api_key}\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall((head + "{").encode())
    assert post(chat()).status_code == 200
    assert "could not be answered" not in caplog.text


def test_log_probs_that_are_not_finite_lose_one_turn_and_not_the_session(gateway, backend, post):
    access = gateway.open_session("numbers")
    headers = {"x-api-key": access.api_key}

    def ask():
        return httpx.post(access.url + "/chat/completions", json=chat(), headers=headers)

    assert ask().status_code == 200
    backend._log_prob = float("nan")
    answer = ask()
    backend._log_prob = -1.0
    assert answer.status_code == 503
    assert "not finite" in answer.json()["error"]["message"]
    assert len(gateway.close_session("numbers")) == 1


def test_a_backend_that_raises_is_named(gateway, backend, post, monkeypatch):
    def refuse(request, index):
        raise ValueError("unheard of")

    monkeypatch.setattr(backend, "_script", refuse)
    answer = post(chat())
    assert answer.status_code == 503
    assert "ValueError: unheard of" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": ' + "[" * 3000 + "</tool_call>",
        "<tool_call>" + '{"a":' * 2000 + "</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": "1"}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    ],
    ids=["not offered", "deep list", "deep object", "not strict", "half a character"],
)
def test_calls_of_no_tool_on_offer_and_malformed_ones_stay_text(gateway, backend, post, monkeypatch, said):
    script = byte_tokenizer()(said + "<|im_end|>", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(backend, "_script", lambda request, index: script)
    strict = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answer = post(
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": strict, "strict": True}}])
    )
    assert answer.status_code == 200
    message = answer.json()["choices"][0]["message"]
    assert "tool_calls" not in message
    assert message["content"].startswith(said[:20])


def test_penalties_are_passed_on(backend, post):
    asked = {"repetition_penalty": 1.2, "presence_penalty": -1, "frequency_penalty": 0.5}
    assert post(chat(**asked)).status_code == 200
    sampling = backend.requests[-1].sampling
    assert {name: getattr(sampling, name) for name in asked} == asked
