"""Anthropic's Messages and OpenAI's Responses through the official clients: recorded and continued like chat."""

import json

import anthropic
import openai
import pytest
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import Gateway, GatewayConfig

CALL = 'Adding.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PICTURE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Talker:
    """A gateway whose model calls a tool while none has answered, and then says so."""

    def __init__(self) -> None:
        tokenizer = byte_tokenizer()

        def script(request, index):
            seen = tokenizer.decode(list(request.prompt_token_ids))
            words = "It is 3." if "<|im_start|>tool" in seen or "<|im_start|>system" in seen else CALL
            return tokenizer(words + "<|im_end|>", add_special_tokens=False)["input_ids"]

        self.backend = ScriptedBackend(script=script)
        self.gateway = Gateway(self.backend, tokenizer, GatewayConfig(model="m", max_model_len=4096))
        self.prompt = lambda: tokenizer.decode(list(self.backend.requests[-1].prompt_token_ids))


@pytest.fixture(scope="module")
def talker():
    talker = Talker()
    with talker.gateway:
        yield talker


@pytest.fixture
def access(talker, request):
    name = request.node.name
    yield talker.gateway.open_session(name)
    if talker.gateway._sessions.find(name):
        talker.gateway.drop_session(name)


@pytest.fixture
def claude(access):
    with anthropic.Anthropic(base_url=access.root_url, api_key=access.api_key, max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(access):
    with openai.OpenAI(base_url=access.url, api_key=access.api_key, max_retries=0) as client:
        yield client


def trajectory(talker, access):
    record = talker.gateway.session(access.session_id)
    assert record.misses == 0
    (made,) = talker.gateway.close_session(access.session_id)
    return made


# ---------------------------------------------------------------- models


def test_a_model_is_retrieved_by_name(gpt, access):
    assert gpt.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        gpt.models.retrieve("other")


# ---------------------------------------------------------------- Anthropic


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_messages_is_one_trajectory(talker, access, claude, stream):
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]

    def ask(messages):
        settings = {"model": "m", "max_tokens": 200, "messages": messages, "tools": tools}
        if not stream:
            return claude.messages.create(**settings)
        with claude.messages.stream(**settings) as events:
            return events.get_final_message()

    asked = [{"role": "user", "content": "1+2?"}]
    first = ask(asked)
    text, call = first.content
    assert (text.text, call.name, call.input, first.stop_reason) == ("Adding.", "add", {"a": 1}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
    blocks = [
        block.model_dump(exclude_none=True, include={"type", "text", "id", "name", "input"})
        for block in first.content
    ]
    second = ask([*asked, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}])
    assert (second.content[0].text, second.stop_reason) == ("It is 3.", "end_turn")
    assert second.usage.input_tokens == len(talker.backend.requests[-1].prompt_token_ids)
    made = trajectory(talker, access)
    assert made.response_length == first.usage.output_tokens + second.usage.output_tokens


def test_settings_of_messages_reach_the_model(talker, claude):
    answer = claude.messages.create(
        model="m",
        max_tokens=50,
        system=[{"type": "text", "text": "Be brief."}],
        messages=[{"role": "user", "content": "x"}],
        extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.9},
        stop_sequences=["is"],
        metadata={"user_id": "me"},
    )
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("It ", "stop_sequence", "is")
    sampling = talker.backend.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 7, 0.9, 50)
    assert talker.prompt().startswith("<|im_start|>system\nBe brief.<|im_end|>")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "`thinking` is not supported"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice` can be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "the `source` of an",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": PICTURE}]}]},
            "only text can be in",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "image", "source": PICTURE}]}]}, "a block must"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "a block must be"),
        ({"messages": [{"role": "system", "content": "x"}]}, "must have the `role` user or assistant"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": 5}]}, "must be a text or a list of blocks"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "each of `tools`"),
        ({"system": 5}, "`system` must be a text"),
        ({"max_tokens": 0}, "`max_tokens` must be a whole number"),
    ],
    ids=str,
)
def test_what_messages_cannot_do_is_refused_by_name(claude, change, part):
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]} | change
    with pytest.raises(anthropic.BadRequestError, match="(?s)" + part):
        claude.post("/v1/messages", body=body, cast_to=object)


# ---------------------------------------------------------------- Responses


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_responses_is_one_trajectory(talker, access, gpt, stream):
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]

    def ask(items):
        if not stream:
            return gpt.responses.create(model="m", input=items, tools=tools)
        with gpt.responses.stream(model="m", input=items, tools=tools) as events:
            return events.get_final_response()

    asked = [{"role": "user", "content": "1+2?"}]
    first = ask(asked)
    message, call = first.output
    assert (first.output_text, call.name, call.arguments) == ("Adding.", "add", '{"a": 1}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    items = [message.model_dump(exclude_none=True), call.model_dump(exclude_none=True)]
    second = ask([*asked, *items, result])
    assert (second.output_text, second.status) == ("It is 3.", "completed")
    made = trajectory(talker, access)
    assert made.response_length == first.usage.output_tokens + second.usage.output_tokens


def test_settings_of_responses_reach_the_model(talker, gpt):
    answer = gpt.responses.create(
        model="m", input="x", instructions="Be brief.", max_output_tokens=4, temperature=0.5
    )
    assert (answer.output_text, answer.status) == ("It i", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert talker.backend.requests[-1].sampling.temperature == 0.5
    assert talker.prompt().startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_a_form_of_the_answer_reaches_the_model_by_each_api(talker, claude, gpt):
    schema = SCHEMA | {"additionalProperties": False}
    settings = talker.backend.requests

    def asked():
        return json.loads(settings[-1].sampling.json_schema or "null")

    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    gpt.chat.completions.create(**chat, response_format={"type": "json_object"})
    assert asked() == {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    gpt.chat.completions.create(**chat, response_format=form)
    assert asked() == schema
    gpt.responses.create(
        model="m", input="x", text={"format": {"type": "json_schema", "name": "n", "schema": schema}}
    )
    assert asked() == schema
    claude.messages.create(
        **chat, max_tokens=9, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert asked() == schema
    gpt.responses.create(model="m", input="x", text={"format": {"type": "text"}})
    assert asked() is None


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"store": True}, "`store` is not supported: nothing is kept"),
        ({"previous_response_id": "resp_1"}, "`previous_response_id` is not supported: nothing is kept"),
        ({"text": {"verbosity": "low"}}, "`text` may have `format` alone"),
        ({"text": {"format": {"type": "json_schema"}}}, "`response_format` can be"),
        ({"reasoning": {"effort": "high"}}, "`reasoning` is not supported"),
        ({"background": True}, "`background` is not supported"),
        ({"tools": [{"type": "web_search"}]}, "must have the type function"),
        ({"tool_choice": "required"}, "`tool_choice` is not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "only text can be in",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "parts of text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "`file_id` of an"),
        ({"input": 5}, "`input` must be"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of `input` must be"),
        ({"max_output_tokens": 0}, "`max_completion_tokens` must be a whole number"),
    ],
    ids=str,
)
def test_what_responses_cannot_do_is_refused_by_name(gpt, change, part):
    with pytest.raises(openai.BadRequestError, match="(?s)" + part):
        gpt.post("/responses", body={"model": "m", "input": "x"} | change, cast_to=object)
