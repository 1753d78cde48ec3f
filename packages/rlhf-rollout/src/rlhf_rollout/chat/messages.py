"""Chat messages as plain data: reduced to what matters, as templates want them, and as keys of a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core import DataError

Message = Mapping[str, Any]


def plain_message(message: Message) -> dict[str, Any]:
    """A message without what does not matter: empty fields, and text in parts instead of a string.

    >>> plain_message({"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None})
    {'role': 'user', 'content': 'hi'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"a message must be an object with a `role`, got {str(message)[:80]!r}")
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise DataError(
                "only text can be in a message's `content`, given as a string or as parts of type `text`"
            )
        content = "".join(part["text"] for part in content)
    plain = {"role": message["role"], "content": content}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": dict(call["function"])} for call in calls
        ]
    return plain | {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: arguments of tool calls as objects, not as JSON in a string."""
    made = []
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
                for call in calls
            ]
        made.append(message)
    return made


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return arguments


def digests(messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[str]:
    """For each message a hash of the tools and of all messages up to it, itself included."""
    running = hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode())
    found = []
    for message in messages:
        running.update(json.dumps(message, sort_keys=True).encode() + b"\n")
        found.append(running.copy().hexdigest())
    return found
