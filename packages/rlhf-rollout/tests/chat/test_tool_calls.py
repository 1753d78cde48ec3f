"""Tool calls: each format, what models get wrong, and which format a template teaches."""

from types import SimpleNamespace

import pytest
from rlhf_core import ConfigError, ToolCall
from rlhf_rollout import tool_call_parser
from rlhf_rollout.chat.tool_calls import bare_json, mistral_json, split_calls, tagged_json, tagged_xml

ADD = ToolCall(name="add", arguments={"a": 1, "b": [2]})


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (tagged_json, 'So <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call><|im_end|>'),
        (tagged_json, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2]}"}</tool_call>'),
        (
            tagged_xml,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2]\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (mistral_json, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": [2]}}]</s>'),
        (mistral_json, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2]}</s>'),
        (bare_json, '{"name": "add", "parameters": {"a": 1, "b": [2]}}<|eot_id|>'),
    ],
)
def test_each_format(parse, text):
    assert list(parse(text)) == [ADD]


@pytest.mark.parametrize("parse", [tagged_json, tagged_xml, mistral_json, bare_json])
def test_an_answer_is_no_call(parse):
    assert list(parse('The sum is {"a": 3}.<|im_end|>')) == []


def test_several_calls_in_order():
    text = "".join(f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>' for i in range(3))
    assert [call.name for call in tagged_json(text)] == ["f0", "f1", "f2"]


@pytest.mark.parametrize(
    ("parse", "text", "error"),
    [
        (tagged_json, "<tool_call>{name: add}</tool_call>", "not JSON"),
        (tagged_json, '<tool_call>{"name": "add"', "not JSON"),
        (tagged_json, "<tool_call>[1]</tool_call>", "an object with the keys"),
        (tagged_json, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments of add"),
        (tagged_xml, "<tool_call>add(1)</tool_call>", "no <function=name>"),
        (mistral_json, "[TOOL_CALLS]nonsense", "no JSON list"),
    ],
)
def test_malformed_calls_are_calls_with_an_error(parse, text, error):
    (call,) = parse(text)
    assert error in call.error


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("... <tool_call>\\n{...}\\n</tool_call>", tagged_json),
        ("... <tool_call>\\n<function=example>", tagged_xml),
        ("... [TOOL_CALLS]", mistral_json),
        ('... {"name": "...", "parameters": ...', bare_json),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_template_tells_the_format(template, parser):
    assert tool_call_parser(SimpleNamespace(chat_template=template)) is parser


def test_by_name_or_path():
    assert tool_call_parser(None, "tagged_json") is tagged_json
    assert tool_call_parser(None, "rlhf_rollout.chat.tool_calls:bare_json") is bare_json
    with pytest.raises(ConfigError, match="write one of bare_json"):
        tool_call_parser(None, "hermes")


@pytest.mark.parametrize(
    ("parse", "text", "rest"),
    [
        (tagged_json, 'So <tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call> now', "So  now"),
        (mistral_json, 'So [TOOL_CALLS]add[ARGS]{"a": 1, "b": [2]}</s>', "So </s>"),
        (mistral_json, 'So [TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": [2]}}]', "So "),
        (bare_json, '{"name": "add", "parameters": {"a": 1, "b": [2]}}', ""),
        (lambda text: [ADD], "mine", "mine"),
    ],
)
def test_calls_are_taken_out_of_the_text(parse, text, rest):
    assert split_calls(text, parse) == (rest, [ADD])


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (tagged_json, "<tool_call>{oops}</tool_call>"),
        (bare_json, '{"name": 3}'),
        (mistral_json, "[TOOL_CALLS]oops"),
        (tagged_json, "no call"),
    ],
)
def test_a_malformed_call_stays_text(parse, text):
    assert split_calls(text, parse) == (text, [])
