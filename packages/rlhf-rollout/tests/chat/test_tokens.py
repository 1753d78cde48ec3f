"""Messages to tokens: what was sampled is continued, not written again."""

import pytest
from rlhf_core import ConfigError, DataError, Observation
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import ChatTokens, TurnTokens

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
    assert ChatTokens(tokenizer).prompt([USER]) == ids(tokenizer, text)


@pytest.mark.parametrize(
    ("last", "closing"),
    [("<|im_end|>", ""), ("4", "<|im_end|>"), ("<", "<|im_end|>")],
    ids=["the model ended its turn", "the turn was cut off", "the turn was cut off in what begins like its end"],
)
def test_a_continuation_closes_the_turn_and_adds_what_is_new(tokenizer, last, closing):
    (last_id,) = ids(tokenizer, last)
    found = ChatTokens(tokenizer).continuation([USER, ANSWER, MORE], [], turn=1, last_token_id=last_id)
    assert found == ids(tokenizer, closing + "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")


def test_prompt_answer_and_continuation_make_the_whole_conversation(tokenizer):
    tokens = ChatTokens(tokenizer)
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
    assert ChatTokens(tokenizer).continuation([USER, ANSWER, MORE], [], turn=1, last_token_id=1) is None


def test_a_tokenizer_without_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTokens(tokenizer)


def test_a_template_that_fails_names_its_complaint(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system prompts') }}"
    with pytest.raises(DataError, match="no system prompts"):
        ChatTokens(tokenizer).prompt([USER])


def test_tool_arguments_reach_the_template_as_objects(tokenizer):
    tokenizer.chat_template = "{{ messages[0].tool_calls[0].function.arguments.a }}"
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert ChatTokens(tokenizer).prompt([message]) == ids(tokenizer, "7")


def test_a_reply_to_any_turn_is_what_the_template_writes_behind_it(tokenizer):
    tokens, (end,) = ChatTokens(tokenizer), ids(tokenizer, "<|im_end|>")
    expected = tokens.continuation([USER, ANSWER, MORE], [], turn=1, last_token_id=end)
    assert tokens.reply([MORE], last_token_id=end) == expected
    assert TurnTokens(tokenizer).reply(Observation(messages=(MORE,)), end).token_ids == list(expected)


def test_a_reply_goes_on_where_the_template_would_rewrite_the_past(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' "
        "and not loop.last else m['content'] }} <|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    thought = {"role": "assistant", "content": "<think>so</think>4"}
    tokens, (end,) = ChatTokens(tokenizer), ids(tokenizer, "<|im_end|>")
    assert tokens.continuation([USER, thought, MORE], [], turn=1, last_token_id=end) is None
    # The template puts a space before the end of the turn; the model has ended it without one.
    assert tokens.reply([MORE], last_token_id=end) == ids(tokenizer, "user:Sure? <|im_end|>assistant:")


def test_a_template_whose_turns_end_with_another_token_than_the_end_of_text(tokenizer):
    tokenizer.eos_token = "<|eos|>"
    tokens, (end,) = ChatTokens(tokenizer), ids(tokenizer, "<|im_end|>")
    answer = ids(tokenizer, "4<|im_end|>")
    whole = tokens.prompt([USER]) + answer
    whole += tokens.continuation([USER, ANSWER, MORE], [], turn=1, last_token_id=end)
    assert whole == tokens.prompt([USER, ANSWER, MORE])


def test_an_end_of_turn_of_ordinary_tokens_is_left_out_only_where_it_was_said_whole(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}##\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokens, (mark,) = ChatTokens(tokenizer), ids(tokenizer, "#")
    # The tokenizer has no token for all of `##`, so half of it is no end.
    assert tokens.reply([MORE], last_token_id=mark) == ids(tokenizer, "##\nuser:Sure?##\nassistant:")
    tokenizer.chat_template = tokenizer.chat_template.replace("##", "#")
    found = ChatTokens(tokenizer).reply([MORE], last_token_id=mark)
    assert found == ids(tokenizer, "\nuser:Sure?#\nassistant:")


def test_a_template_without_an_assistants_content_cannot_be_continued(tokenizer):
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(ConfigError, match="does not show an assistant's content"):
        ChatTokens(tokenizer).reply([MORE], last_token_id=1)
