"""Tool calls in a turn's text, in the format that the model's chat template teaches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_core import ConfigError, ToolCall, load_object

ToolCallParser = Callable[[str], Sequence[ToolCall]]
"""Text of a turn, special tokens included, to its calls."""

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_XML_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\[ARGS\]")


def tagged_json(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them (Hermes, Qwen 2.5 and 3).

    >>> tagged_json('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    return [_call(body) for body in _TAGGED.findall(text)]


def tagged_xml(text: str) -> list[ToolCall]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen 3 Coder).

    >>> tagged_xml("<tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>")
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    calls = []
    for body in _TAGGED.findall(text):
        if not (found := _XML_FUNCTION.search(body)):
            calls.append(ToolCall(name="", error="no <function=name> in the tool call"))
            continue
        arguments = {key.strip(): _value(value) for key, value in _XML_PARAMETER.findall(found.group(2))}
        calls.append(ToolCall(name=found.group(1).strip(), arguments=arguments))
    return calls


def mistral_json(text: str) -> list[ToolCall]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` (Mistral).

    >>> mistral_json('[TOOL_CALLS]add[ARGS]{"a": 1}')
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        body = part.partition("</s>")[0]
        if found := _MISTRAL_CALL.match(body):
            calls.append(_call(f'{{"name": {json.dumps(found.group(1))}, "arguments": {body[found.end() :]}}}'))
            continue
        try:
            calls += [_from_json(item) for item in json.loads(body)]
        except (ValueError, TypeError) as error:
            calls.append(ToolCall(name="", error=f"the tool calls are no JSON list: {error}"))
    return calls


def bare_json(text: str) -> list[ToolCall]:
    """The whole turn is `{"name": ..., "parameters": {...}}` (Llama 3).

    >>> bare_json('<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>')
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    body = re.sub(r"<\|\w+\|>", "", text).strip()
    return [_call(body)] if body.startswith("{") and '"name"' in body else []


FORMATS: Mapping[str, ToolCallParser] = {
    "bare_json": bare_json,
    "mistral_json": mistral_json,
    "tagged_json": tagged_json,
    "tagged_xml": tagged_xml,
}


_SPANS: Mapping[ToolCallParser, re.Pattern[str]] = {
    bare_json: re.compile(r".+", re.DOTALL),
    mistral_json: re.compile(r"\[TOOL_CALLS\].*?(?=\[TOOL_CALLS\]|</s>|$)", re.DOTALL),
    tagged_json: _TAGGED,
    tagged_xml: _TAGGED,
}


def split_calls(text: str, parse: ToolCallParser) -> tuple[str, list[ToolCall]]:
    """The text without its tool calls, and the calls; a malformed call stays text.

    With a parser of your own the text stays whole.

    >>> split_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', tagged_json)
    ('Let me see. ', [ToolCall(name='add', arguments={'a': 1}, error='')])
    """
    if parse not in _SPANS:
        return text, [call for call in parse(text) if not call.error]
    found: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        calls = parse(match[0])
        if not calls or any(call.error for call in calls):
            return match[0]
        found.extend(calls)
        return ""

    return _SPANS[parse].sub(take, text), found


def tool_call_parser(tokenizer: Any, format: str | None = None) -> ToolCallParser | None:
    """The parser for a tokenizer's chat template; None where the template knows no tool calls.

    `format` is a name of `FORMATS`, or `module:function` of your own, for a template that this does not recognise.

    Raises:
        ConfigError: there is no such format.
    """
    if format is not None:
        if ":" in format:
            return load_object(format, what="tool-call parser")
        if format not in FORMATS:
            raise ConfigError(f"tool-call format {format!r} is unknown; write one of {', '.join(FORMATS)}")
        return FORMATS[format]
    template = getattr(tokenizer, "chat_template", None) or ""
    template = "".join(template.values()) if isinstance(template, Mapping) else str(template)
    marks = [
        ("<function=", "tagged_xml"),
        ("<tool_call>", "tagged_json"),
        ("[TOOL_CALLS]", "mistral_json"),
        ('"parameters": ', "bare_json"),
    ]
    return next((FORMATS[name] for mark, name in marks if mark in template), None)


def _call(body: str) -> ToolCall:
    try:
        return _from_json(json.loads(body))
    except ValueError as error:
        return ToolCall(name="", error=f"the tool call is not JSON: {error}")


def _from_json(item: Any) -> ToolCall:
    if not isinstance(item, Mapping) or not isinstance(name := item.get("name"), str):
        return ToolCall(name="", error='a tool call is an object with the keys "name" and "arguments"')
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _value(arguments)
    if not isinstance(arguments, Mapping):
        return ToolCall(name=name, error=f"the arguments of {name} must be an object of values by name")
    return ToolCall(name=name, arguments=dict(arguments))


def _value(text: str) -> Any:
    """A value as JSON if it is, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
