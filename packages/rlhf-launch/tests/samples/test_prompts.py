import pytest
from rlhf_algos import DataSection, DataSource, LengthSection, Row
from rlhf_core import ConfigError, DataError
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_launch.samples.prompts import PromptFormat, PromptStream, load_prompts, make_prompts

TOKENIZER = byte_tokenizer()


def rows(*values):
    return [Row(source="p.jsonl", number=n, values=value) for n, value in enumerate(values, 1)]


def form(*, max_prompt_tokens=None, long_prompts="error", **settings):
    lengths = LengthSection(max_prompt_tokens=max_prompt_tokens, long_prompts=long_prompts)
    return PromptFormat(lengths=lengths, **settings)


def test_plain_text_and_the_other_columns():
    (prompt,), dropped = make_prompts(rows({"prompt": "1+1=", "answer": "2"}), TOKENIZER, form())
    assert TOKENIZER.decode(prompt.token_ids) == "1+1="
    assert prompt.metadata == {"answer": "2"}
    assert dropped == 0


def test_messages_get_the_chat_template_and_the_system_prompt():
    messages = [{"role": "user", "content": "hi"}]
    (prompt,), _ = make_prompts(rows({"prompt": messages}), TOKENIZER, form(system_prompt="be brief"))
    assert prompt.text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    (same,), _ = make_prompts(rows({"prompt": "hi"}), TOKENIZER, form(chat=True, system_prompt="be brief"))
    assert same.token_ids == prompt.token_ids


@pytest.mark.parametrize("column", ["images", "image"])
def test_prompts_with_images_are_refused_with_their_row(column):
    with pytest.raises(DataError, match=rf"p\.jsonl row 2 has {column}.*columns: \{{picture: {column}\}}"):
        make_prompts(rows({"prompt": "a", column: []}, {"prompt": "b", column: ["a.png"]}), TOKENIZER, form())


def test_messages_without_a_chat_template_are_refused_with_the_row():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"p.jsonl row 2.*no chat template"):
        make_prompts(
            rows({"prompt": "x"}, {"prompt": [{"role": "user", "content": "hi"}]}),
            tokenizer,
            form(),
        )


@pytest.mark.parametrize(
    ("value", "message"), [("", "row 1: the prompt is empty"), (7, "must be text or a list of chat messages")]
)
def test_unusable_prompts_are_refused(value, message):
    with pytest.raises(DataError, match=message):
        make_prompts(rows({"prompt": value}), TOKENIZER, form())


def test_overlong_prompts_are_an_error_or_counted():
    data = rows({"prompt": "short"}, {"prompt": "much too long"})
    with pytest.raises(DataError, match=r"row 2: the prompt has 13 tokens, lengths.max_prompt_tokens is 8"):
        make_prompts(data, TOKENIZER, form(max_prompt_tokens=8))
    prompts, dropped = make_prompts(data, TOKENIZER, form(max_prompt_tokens=8, long_prompts="drop"))
    assert ([p.text for p in prompts], dropped) == (["short"], 1)
    ends, _ = make_prompts(data, TOKENIZER, form(max_prompt_tokens=8, long_prompts="keep_end"))
    assert TOKENIZER.decode(ends[1].token_ids) == "too long"
    with pytest.raises(DataError, match="all 2 prompts are longer"):
        make_prompts(data, TOKENIZER, form(max_prompt_tokens=2, long_prompts="drop"))


def chat(*roles):
    return {"prompt": [{"role": role, "content": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat("human"), "role 'human'; did you mean 'user'"),
        (chat("user", "assistant"), "ends with the assistant's message"),
        ({"question": "x"}, "no column 'prompt'"),
    ],
)
def test_conversations_that_cannot_be_answered_are_refused(row, message):
    with pytest.raises(DataError, match=message):
        make_prompts(rows(row), TOKENIZER, form())


def test_a_whole_conversation_is_a_prompt_up_to_the_last_user_turn():
    whole = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
        "answer": "y",
    }
    (prompt,), _ = make_prompts(rows(whole), TOKENIZER, form())
    (same,), _ = make_prompts(rows({"prompt": "hi"}), TOKENIZER, form(chat=True))
    assert prompt.token_ids == same.token_ids
    assert prompt.metadata == {"answer": "y"}


def test_a_broken_chat_template_is_named():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ConfigError, match=r"row 1: the chat template cannot render.*no such role.*chat_template"):
        make_prompts(rows(chat("user")), tokenizer, form())


def write(path, count, name):
    path.write_text("".join(f'{{"prompt": "{name}{i}"}}\n' for i in range(count)))
    return path


def test_several_datasets_are_numbered_held_out_and_mixed(tmp_path):
    paths = [write(tmp_path / "a.jsonl", 90, "a"), write(tmp_path / "b.jsonl", 10, "b")]
    sources = tuple(DataSource(path=str(path), weight=0.5) for path in paths)
    data = DataSection(train=sources, hold_out=2)
    found = load_prompts(sources, TOKENIZER, form(), hold_out=data.held_out_rows)
    assert (found.sizes, found.weights, len(found.held_out)) == ((88, 8), (0.5, 0.5), 4)
    assert len({prompt.prompt_id for prompt in [*found.prompts, *found.held_out]}) == 100
    stream = PromptStream(found.prompts, seed=1, mixture=(found.sizes, found.weights))
    share = sum(prompt.text.startswith("b") for prompt in stream.take(960)) / 960
    assert 0.45 < share < 0.55
    again = PromptStream(found.prompts, seed=1, mixture=(found.sizes, found.weights), position=100)
    assert again.take(5) == [stream.at(place) for place in range(100, 105)]


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
