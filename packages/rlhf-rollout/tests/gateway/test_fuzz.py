"""Random requests at every endpoint: each is answered, or refused with what is wrong; none ends in a fault."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import Gateway, GatewayConfig
from rlhf_rollout.gateway.apis import fields

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["\ud800", "auto", "function", 10**30, -1, 0, 1e-40, "<|im_end|>", "{%"]),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "a"]), children)
    ),
    max_leaves=4,
)


def mostly(*good):
    """One of the values given, or junk."""
    return st.sampled_from(good) | JUNK


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "1", "content": "y"}]
MESSAGE = st.fixed_dictionaries(
    {"role": mostly("user", "user", "assistant", "tool", "system"), "content": mostly("hi", "", None, PARTS)},
    optional={
        "tool_calls": mostly([CALL]),
        "tool_call_id": mostly("1"),
        "reasoning_content": mostly("hm"),
        "name": JUNK,
    },
)
ITEM = MESSAGE | st.fixed_dictionaries(
    {"type": mostly("function_call", "function_call_output", "reasoning", "message")},
    optional={"call_id": mostly("1"), "name": mostly("f"), "arguments": mostly("{}"), "output": mostly("y")},
)
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TOOLS = mostly([CHAT_TOOL], [{"type": "function", "name": "f"}], [{"name": "f", "input_schema": {}}], [])
NAMES = sorted({*fields._HONOURED["chat"], *fields._AS_IT_IS, *fields._LABELS, "system", "thinking", "text"})
BODY = st.builds(
    lambda known, more: {"model": "m", "max_tokens": 9} | known | more,
    st.fixed_dictionaries(
        {},
        optional={
            "messages": st.lists(MESSAGE, max_size=3) | JUNK,
            "input": st.lists(ITEM, max_size=3) | mostly("hi"),
            "prompt": mostly("hi", [5, 6]),
            "tools": TOOLS,
            "stream": mostly(True, False),
        },
    ),
    st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=2),
)
PATHS = ["/chat/completions", "/completions", "/messages", "/responses"]


@pytest.fixture(scope="module")
def ask():
    script = byte_tokenizer()("x<tool_call>{}</tool_call><|im_end|>", add_special_tokens=False)["input_ids"]
    backend = ScriptedBackend(script=lambda request, index: script)
    config = GatewayConfig(model="m", max_model_len=512)
    with Gateway(backend, byte_tokenizer(), config) as gateway:
        access = gateway.open_session("fuzz")
        with httpx.Client(base_url=access.url, headers={"x-api-key": access.api_key}) as client:
            yield lambda path, body: client.post(path, content=body)
        gateway.close_session("fuzz")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=BODY)
def test_no_request_ends_in_a_fault(ask, path, body):
    answer = ask(path, json.dumps(body).encode())
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert len(answer.json()["error"]["message"]) > 10
    else:
        assert '"type": "server_error"' not in answer.text


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_no_bytes_end_in_a_fault(ask, path, body):
    assert ask(path, body).status_code == 400
