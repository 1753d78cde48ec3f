"""Conversations: lists of messages, in the form of chat templates and in forms that other tools write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Roles that chat templates know."""

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}


def check_messages(messages: Sequence[Any]) -> str | None:
    """What is wrong with a list of messages; None if nothing is."""
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            return f"message {str(message)[:60]!r} has no 'role' and 'content'"
        role = message["role"]
        if role not in ROLES:
            meant = _SHAREGPT_ROLES.get(str(role))
            hint = f"did you mean {meant!r}? " if meant else ""
            return f"a message has the role {role!r}; {hint}roles are {', '.join(sorted(ROLES))}"
    return None


def with_system_prompt(messages: Sequence[Mapping[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """The messages, after a system message unless they begin with one."""
    own = [dict(message) for message in messages]
    if system_prompt is None or (own and own[0].get("role") in ("system", "developer")):
        return own
    return [{"role": "system", "content": system_prompt}, *own]


def in_our_form(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row in the columns that our readers know.

    ShareGPT's `{from, value}` messages become `{role, content}`, its column `conversations` becomes `messages`
    (with `system` as its first message); a single such message in `chosen` or `rejected` becomes a list of one.
    Alpaca's `instruction`, `input` and `output` become `prompt` and `completion`, the input after a blank line.

    >>> in_our_form({"instruction": "Add.", "input": "1 and 2", "output": "3"})
    {'prompt': 'Add.\\n\\n1 and 2', 'completion': '3'}
    >>> in_our_form({"conversations": [{"from": "human", "value": "Hi"}]})
    {'messages': [{'role': 'user', 'content': 'Hi'}]}
    """
    converted = {name: _messages(value) for name, value in values.items()}
    if "conversations" in converted and not {"messages", "prompt"} & set(converted):
        messages = converted.pop("conversations")
        system = converted.pop("system", None)
        given = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
        named = "prompt" if "chosen" in converted else "messages"
        return {named: [*given, *messages] if isinstance(messages, list) else messages} | converted
    alpaca = {"instruction", "output"} <= set(converted) and not {"prompt", "completion", "messages"} & set(
        converted
    )
    if alpaca and isinstance(converted["instruction"], str):
        instruction, extra = converted.pop("instruction"), converted.pop("input", None)
        prompt = f"{instruction}\n\n{extra}" if extra else instruction
        return {"prompt": prompt, "completion": converted.pop("output")} | converted
    return converted


def _messages(value: Any) -> Any:
    """ShareGPT messages in the form of chat templates; anything else as it is."""
    if _is_sharegpt(value):
        return [_message(value)]
    if isinstance(value, list) and value and all(map(_is_sharegpt, value)):
        return [_message(message) for message in value]
    return value


def _is_sharegpt(value: Any) -> bool:
    return isinstance(value, Mapping) and "from" in value and "value" in value and "role" not in value


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = str(message["from"])
    return {"role": _SHAREGPT_ROLES.get(role, role), "content": message["value"]}
