"""What a server makes of requests."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_core import DataError
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_launch.reward_server.requests import RowEncoder, parse


def rows(body, **changes):
    return RowEncoder(byte_tokenizer(), max_length=changes.pop("max_length", 64)).rows(
        parse(json.dumps(body).encode())
    )


def ids(text):
    return byte_tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_prompt_and_completion_are_closed_by_the_end_of_text():
    (row,) = rows({"prompts": ["ab"], "completions": ["c"]})
    assert row == ids("abc<|im_end|>")
    assert rows({"prompts": ["ab"], "completions": ["c<|im_end|>"]}) == [row]
    assert rows({"prompts": [None], "completions": ["abc"]}) == [row]


def test_messages_are_rendered_by_the_template():
    messages = [{"role": "user", "content": "hi"}]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    expected = ids(rendered + "yo<|im_end|>")
    assert rows({"prompts": [messages], "completions": ["yo"]}) == [expected]
    assert rows({"prompts": [rendered], "completions": ["yo"]}) == [expected]
    assert rows({"query": [[*messages, {"role": "assistant", "content": "yo"}]]}) == [expected]
    assert rows({"query": [f"<|pad|><|pad|>{rendered}yo<|im_end|><|pad|>"]}) == [expected]


def test_a_tokenizers_own_first_token_comes_once():
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    first = tokenizer.convert_tokens_to_ids("<|eos|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|eos|> $A", special_tokens=[("<|eos|>", first)]
    )
    assert tokenizer("a")["input_ids"] == [first, *ids("a")]
    encode = RowEncoder(tokenizer, max_length=64).rows
    assert encode(parse(b'{"prompts": ["a"], "completions": ["b"]}')) == [[first, *ids("ab<|im_end|>")]]
    rendered = json.dumps({"prompts": ["<|eos|><|im_start|>a"], "completions": ["b"]}).encode()
    assert encode(parse(rendered)) == [[first, *ids("<|im_start|>ab<|im_end|>")]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "must be a JSON object, got a list"),
        (b"3", "got a number"),
        (b"{}", "it has nothing"),
        (b'{"texts": ["a"]}', "'texts'"),
        (b'{"completions": "a", "prompts": "b"}', "one entry per sample, got a text"),
        (b'{"completions": ["a"]}', "'prompts' must be a list"),
        (b'{"completions": ["a"], "prompts": []}', "0 prompts and 1 completions"),
        (b'{"completions": [1], "prompts": ["a"]}', "completions[0] must be a text, got a number"),
        (b'{"completions": [null], "prompts": ["a"]}', "got nothing"),
        (b'{"completions": ["a"], "prompts": [{}]}', "prompts[0] must be a text or a list"),
        (b'{"completions": ["a"], "prompts": [[{"role": "user"}]]}', "'content' must be a text, got nothing"),
        (b'{"completions": ["a"], "prompts": [["x"]]}', "a message must be an object"),
        (b'{"query": [3]}', "query[0]"),
        (b'{"query": [[{"role": "user", "content": "a"}]]}', "must end with a message of the assistant"),
        (b'{"query": {}}', "'query' must be a list"),
        (b'{"query": ["\\ud800"]}', "surrogate"),
        (b'{"a": ' + b"[" * 100000, "nested"),
    ],
)
def test_bad_bodies_are_refused_with_a_sentence(body, message):
    with pytest.raises(DataError) as found:
        parse(body)
    assert message in str(found.value)


WORDS = st.text(max_size=8) | st.sampled_from(["<|im_start|>", "<|im_end|>", "user", "assistant", "\x00"])
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "name"]), WORDS | st.none() | st.integers(), max_size=3
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner | MESSAGE, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
BODY = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("query", "prompts", "completions"), ANYTHING | st.lists(ANYTHING, max_size=2))
)


@settings(max_examples=400, deadline=None)
@given(body=(ANYTHING | BODY).map(json.dumps).map(str.encode) | st.binary(max_size=40))
def test_whatever_is_sent_is_rows_or_a_sentence(body):
    encoder = RowEncoder(byte_tokenizer_once(), max_length=64)
    try:
        found = encoder.rows(parse(body))
    except DataError:
        return
    assert all(0 < len(row) <= 64 for row in found)


@cache
def byte_tokenizer_once():
    return byte_tokenizer()


def test_rows_that_are_too_long_or_empty_are_refused():
    with pytest.raises(DataError, match="row 1 has 66 tokens, the model takes 64"):
        rows({"query": ["a", "b" * 65]})
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="row 0 is empty"):
        RowEncoder(tokenizer, max_length=9).rows(parse(b'{"query": [""]}'))


def test_messages_without_a_template_or_that_it_refuses():
    tokenizer = byte_tokenizer()
    asked = parse(b'{"prompts": [[{"role": "user", "content": "a"}]], "completions": ["b"]}')
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(DataError, match="does not take these messages"):
        RowEncoder(tokenizer, max_length=9).rows(asked)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        RowEncoder(tokenizer, max_length=9).rows(asked)
