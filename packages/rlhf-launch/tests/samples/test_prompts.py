import pytest
from rlhf_algos import Row
from rlhf_core import DataError
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_launch.samples.prompts import PromptFormat, PromptStream, make_prompts

TOKENIZER = byte_tokenizer()


def rows(*values):
    return [Row(source="p.jsonl", number=n, values=value) for n, value in enumerate(values, 1)]


def test_plain_text_and_the_other_columns():
    (prompt,), dropped = make_prompts(rows({"prompt": "1+1=", "answer": "2"}), TOKENIZER)
    assert TOKENIZER.decode(prompt.token_ids) == "1+1="
    assert prompt.metadata == {"answer": "2"}
    assert dropped == 0


def test_messages_get_the_chat_template_and_the_system_prompt():
    messages = [{"role": "user", "content": "hi"}]
    (prompt,), _ = make_prompts(rows({"prompt": messages}), TOKENIZER, PromptFormat(system_prompt="be brief"))
    assert prompt.text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    (same,), _ = make_prompts(rows({"prompt": "hi"}), TOKENIZER, PromptFormat(chat=True, system_prompt="be brief"))
    assert same.token_ids == prompt.token_ids


def test_messages_without_a_chat_template_are_refused_with_the_row():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"p.jsonl row 2.*no chat template"):
        make_prompts(rows({"prompt": "x"}, {"prompt": [{"role": "user", "content": "hi"}]}), tokenizer)


@pytest.mark.parametrize(
    ("value", "message"), [("", "row 1: the prompt is empty"), (7, "must be text or a list of chat messages")]
)
def test_unusable_prompts_are_refused(value, message):
    with pytest.raises(DataError, match=message):
        make_prompts(rows({"prompt": value}), TOKENIZER)


def test_overlong_prompts_are_an_error_or_counted():
    data = rows({"prompt": "short"}, {"prompt": "much too long"})
    with pytest.raises(DataError, match=r"row 2: the prompt has 13 tokens, data.max_prompt_tokens is 8"):
        make_prompts(data, TOKENIZER, PromptFormat(max_tokens=8))
    prompts, dropped = make_prompts(data, TOKENIZER, PromptFormat(max_tokens=8, drop_overlong=True))
    assert ([p.text for p in prompts], dropped) == (["short"], 1)
    with pytest.raises(DataError, match="all 2 prompts are longer"):
        make_prompts(data, TOKENIZER, PromptFormat(max_tokens=2, drop_overlong=True))


def test_a_resumed_stream_goes_on_where_it_stopped():
    whole = PromptStream(range(7), seed=3).take(30)
    stream = PromptStream(range(7), seed=3)
    first = stream.take(11)
    resumed = PromptStream(range(7), seed=3, position=stream.position)
    assert first + resumed.take(19) == whole


def test_each_pass_has_every_prompt_once_in_its_own_order():
    stream = PromptStream(range(50), seed=0)
    first, second = stream.take(50), stream.take(50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
