"""Messages reduced to what matters, and the keys of conversations."""

import pytest
from rlhf_core import DataError
from rlhf_rollout.chat.messages import digests, plain_message

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
MORE = {"role": "user", "content": "Sure?"}


def test_messages_are_reduced_to_what_matters():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}, "index": 0}
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    plain = plain_message(message)
    assert plain["content"] == ""
    assert "refusal" not in plain
    assert plain["tool_calls"][0]["function"]["name"] == "add"
    assert plain_message(plain) == plain
    with pytest.raises(DataError, match="role"):
        plain_message({"content": "x"})
    with pytest.raises(DataError, match="only text"):
        plain_message({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})


def test_digests_tell_prefixes_apart():
    one, two = digests([USER, ANSWER]), digests([USER, ANSWER, MORE])
    assert two[:2] == one
    assert len({*two, *digests([MORE]), *digests([USER], [{"name": "add"}])}) == 5


def call(name, arguments, id):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, **more):
    return plain_message({"role": "assistant", "tool_calls": list(calls)} | more)


def result(id, text="3"):
    return plain_message({"role": "tool", "tool_call_id": id, "content": text})


def test_calls_are_the_same_by_value_and_by_place():
    sent = digests([USER, calling(call("add", '{"a": 1, "b": [2.0]}', "x"), content=None), result("x")])
    renamed = digests([USER, calling(call("add", '{ "b":[2.0],"a":1}', "y"), content=""), result("y")])
    assert sent == renamed
    for other in (
        [calling(call("add", '{"a": 2, "b": [2.0]}', "x")), result("x")],
        [calling(call("sub", '{"a": 1, "b": [2.0]}', "x")), result("x")],
        [calling(call("add", '{"a": 1, "b": [2.0]}', "x")), result("z")],
        [calling(call("add", '{"a": 1, "b": [2.0]}', "x")), result("x", "4")],
    ):
        assert digests([USER, *other])[-1] != sent[-1]


def test_results_of_parallel_calls_belong_to_their_calls():
    def talk(first, second, of_first, of_second):
        calls = calling(call("add", "{}", first), call("add", "{}", second))
        return digests([USER, calls, result(of_first, "1"), result(of_second, "2")])[-1]

    assert talk("a", "b", "a", "b") == talk("p", "q", "p", "q")
    assert talk("a", "b", "a", "b") != talk("a", "b", "b", "a")


def test_reasoning_may_be_left_out_of_the_history():
    thinking = plain_message({"role": "assistant", "content": "4", "reasoning_content": "2 and 2"})
    assert digests([USER, thinking]) == digests([USER, ANSWER])
