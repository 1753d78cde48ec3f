"""The one internal form of a chat request, whatever API it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core import DataError, ToolCall

from rlhf_rollout.chat.images import check_pixels
from rlhf_rollout.chat.messages import Message, plain_message
from rlhf_rollout.gateway.apis.strict_tools import check_strict, fits

_RENDERING = {
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "self", "processor_kwargs"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatForm:
    """What the chat template shows to the model."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, `enable_thinking` for instance."""

    def takes(self, call: ToolCall) -> bool:
        """Whether a call is of a tool on offer, and fits its schema if that is strict."""
        offered = {tool["function"]["name"]: tool["function"] for tool in self.tools}
        function = offered.get(call.name)
        if function is None:
            return False
        schema = function.get("parameters") or {}
        return not function.get("strict") or fits(dict(call.arguments), schema, schema)


def read_chat(
    body: Mapping[str, Any], *, most_characters: int, most_messages: int, images: bool = False
) -> ChatForm:
    """Messages, tools and options of a chat request; `images`: whether messages may have some.

    Raises:
        DataError: one of them has the wrong form, or they are more than any context of the model holds.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError("`messages` must be a list with at least one message")
    if len(messages) > most_messages:
        raise DataError(
            f"`messages` may have {most_messages} messages, got {len(messages)}; shorten the conversation"
        )
    plain = [
        plain_message(message, place=f"message {number}", images=images)
        for number, message in enumerate(messages, start=1)
    ]
    check_pixels(plain)
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        raise DataError(f"`tools` must be a list, got {str(tools)[:200]!r}")
    for tool in tools:
        _check_tool(tool)
    check_length(_characters([plain, tools]), most_characters)
    options = body.get("chat_template_kwargs", {})
    if not isinstance(options, dict) or not all(name.isidentifier() for name in options):
        raise DataError(f"`chat_template_kwargs` must be an object of names and values, got {str(options)[:200]!r}")
    if taken := _RENDERING & set(options):
        raise DataError(f"`chat_template_kwargs` cannot set {', '.join(sorted(taken))}; leave it out")
    return ChatForm(messages=plain, tools=[] if body.get("tool_choice") == "none" else tools, options=options)


def check_length(characters: int, most: int) -> None:
    """Refuse a text before it is tokenised if no context can hold it.

    Raises:
        DataError: it has more than `most` characters.
    """
    if characters > most:
        raise DataError(
            f"the prompt has {characters} characters, and the model's context holds {most} at most; shorten the "
            "conversation"
        )


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _check_tool(tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if (
        not isinstance(function, Mapping)
        or tool.get("type") != "function"
        or not isinstance(function.get("name"), str)
        or not function["name"]
        or not isinstance(function.get("description") or "", str)
        or not isinstance(function.get("parameters") or {}, Mapping)
    ):
        raise DataError(
            'each of `tools` must be {"type": "function", "function": {"name": ..., "description": ..., '
            f'"parameters": {{...}}}}}}, got {str(tool)[:200]!r}'
        )
    if not isinstance(strict := function.get("strict") or False, bool):
        raise DataError(f"a tool's `strict` must be true or false, got {str(strict)[:80]!r}")
    if strict:
        check_strict(function.get("parameters") or {}, f"tool {function['name']!r}")
