"""Messages to tokens: what was sampled is continued, not written again."""

import pytest
from rlhf_core import ConfigError, DataError
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout.conversation_tokens import ConversationTokens, digests, plain_message

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
MORE = {"role": "user", "content": "Sure?"}


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


def ids(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_prompt_is_the_rendered_template(tokenizer):
    text = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert ConversationTokens(tokenizer).prompt([USER]) == ids(tokenizer, text)


@pytest.mark.parametrize(
    ("last", "closing"),
    [("<|im_end|>", ""), ("4", "<|im_end|>")],
    ids=["the model ended its turn", "the turn was cut off"],
)
def test_a_continuation_closes_the_turn_and_adds_what_is_new(tokenizer, last, closing):
    (last_id,) = ids(tokenizer, last)
    found = ConversationTokens(tokenizer).continuation([USER, ANSWER, MORE], [], turn=1, last_token_id=last_id)
    assert found == ids(tokenizer, closing + "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")


def test_prompt_answer_and_continuation_make_the_whole_conversation(tokenizer):
    tokens = ConversationTokens(tokenizer)
    answer = ids(tokenizer, "4<|im_end|>")
    whole = tokens.prompt([USER]) + answer
    whole += tokens.continuation([USER, ANSWER, MORE], [], turn=1, last_token_id=answer[-1])
    assert whole == tokens.prompt([USER, ANSWER, MORE])


def test_a_template_that_rewrites_the_past_has_no_continuation(tokenizer):
    # As some reasoning models do: only the last answer keeps its thoughts.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ '' if m['role'] == 'assistant' and not loop.last else "
        "m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert ConversationTokens(tokenizer).continuation([USER, ANSWER, MORE], [], turn=1, last_token_id=1) is None


def test_a_tokenizer_without_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ConversationTokens(tokenizer)


def test_a_template_that_fails_names_its_complaint(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system prompts') }}"
    with pytest.raises(DataError, match="no system prompts"):
        ConversationTokens(tokenizer).prompt([USER])


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


def test_tool_arguments_reach_the_template_as_objects(tokenizer):
    tokenizer.chat_template = "{{ messages[0].tool_calls[0].function.arguments.a }}"
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert ConversationTokens(tokenizer).prompt([message]) == ids(tokenizer, "7")


def test_digests_tell_prefixes_apart():
    one, two = digests([USER, ANSWER]), digests([USER, ANSWER, MORE])
    assert two[:2] == one
    assert len({*two, *digests([MORE]), *digests([USER], tools=[{"name": "add"}])}) == 5
