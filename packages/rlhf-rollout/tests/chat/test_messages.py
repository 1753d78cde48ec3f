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
    assert len({*two, *digests([MORE]), *digests([USER], tools=[{"name": "add"}])}) == 5
