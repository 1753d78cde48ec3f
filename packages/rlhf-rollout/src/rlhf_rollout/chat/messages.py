"""Chat messages as plain data: checked, reduced to what matters, as templates want them, keys of a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core import DataError

from rlhf_rollout.chat.images import ChatImage

Message = Mapping[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_DETAILS = (None, "auto")
_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}


def plain_message(message: Message, *, place: str = "a message", images: bool = False) -> dict[str, Any]:
    """A message without what does not matter: empty fields, and text in parts instead of a string.

    >>> plain_message({"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None})
    {'role': 'user', 'content': 'hi'}

    Args:
        message: in OpenAI's form.
        place: what it is, for messages about its images.
        images: whether the model takes any. The content of a message with some is a list of parts: texts, and
            `{"type": "image", "image": ChatImage}`.

    Raises:
        DataError: no message, or one with fields or parts that no template shows.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"a message must be an object with a `role`, got {str(message)[:80]!r}")
    role = message["role"]
    if role not in _ROLES:
        raise DataError(f"a message's `role` must be one of {', '.join(_ROLES)}, got {role[:80]!r}")
    for name, value in message.items():
        if name not in _FIELDS and value not in (None, [], {}):
            raise DataError(f"a message's `{str(name)[:80]}` is not supported; leave it out")
    # Clients send what newer models of OpenAI call the system's message.
    content = _content(message, place, images=images)
    if isinstance(content, list) and role == "assistant":
        raise DataError(f"{place}: a message of the assistant has no images here; leave them out")
    plain: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if calls := message.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise DataError("`tool_calls` must be a list, in a message of the assistant")
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    for name, value in (
        ("name", message.get("name")),
        ("tool_call_id", message.get("tool_call_id")),
        ("reasoning_content", reasoning),
    ):
        if not value:
            continue
        if not isinstance(value, str):
            raise DataError(f"a message's `{name}` must be a text, got {str(value)[:80]!r}")
        plain[name] = value
    return plain


def _content(message: Message, place: str, *, images: bool) -> str | list[dict[str, Any]]:
    """The text of a message, or with images its parts, in which texts that follow each other are one."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    count = 0
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            if parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += part["text"]
            elif part["text"]:
                parts.append({"type": "text", "text": part["text"]})
        elif kind == "image_url" and images:
            count += 1
            parts.append({"type": "image", "image": _image(part, f"{place}, image {count}")})
        else:
            known = "text and images" if images else "only text"
            raise DataError(
                f"{known} can be in a message's `content`, given as a string or as parts of type `text`, each with "
                f"its `text`{', and `image_url`' if images else ''}; got {str(part)[:80]!r}"
            )
    return parts if count else "".join(part["text"] for part in parts)


def _image(part: Mapping[str, Any], place: str) -> ChatImage:
    found = part.get("image_url")
    if not isinstance(found, Mapping) or set(found) - {"url", "detail"} or found.get("detail") not in _DETAILS:
        raise DataError(
            f'{place}: `image_url` must be {{"url": "data:image/png;base64,..."}}: the model\'s processor sets the '
            f"detail of an image; got {str(found)[:80]!r}"
        )
    return ChatImage.of_data_url(found.get("url"), place)


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments", ""), str | Mapping)
        or not isinstance(call.get("id") or "", str)
        or call.get("type", "function") != "function"
    ):
        raise DataError(
            'each of `tool_calls` must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": '
            f'"..."}}}}, got {str(call)[:80]!r}'
        )
    named = {"name": function["name"], "arguments": function.get("arguments", "")}
    return {"id": call.get("id"), "type": "function", "function": named}


def template_messages(messages: Sequence[Message], *, in_parts: bool = False) -> list[dict[str, Any]]:
    """Messages as chat templates want them: arguments of tool calls as objects, not as JSON in a string.

    `in_parts`: contents as parts, as all templates of vision-language models take them.
    """
    made = []
    for message in messages:
        message = dict(message)
        content = message.get("content") or ""
        if isinstance(content, list):
            message["content"] = [{"type": "image"} if part.get("type") == "image" else part for part in content]
        elif in_parts:
            message["content"] = [{"type": "text", "text": content}]
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
    except (ValueError, RecursionError):
        return arguments


def digests(messages: Sequence[Message], context: Any = ()) -> list[str]:
    """For each message a hash of the context (tools, template options) and of the messages up to it, with itself.

    Tool calls are compared by name and parsed arguments, and their ids by the places of the calls: clients write
    JSON anew and rename calls. Reasoning, which clients may leave out, does not count.
    """
    running = hashlib.sha256(json.dumps(context, sort_keys=True).encode())
    places: dict[str, int] = {}
    found = []
    for message in messages:
        running.update(json.dumps(_essence(message, places), sort_keys=True).encode() + b"\n")
        found.append(running.copy().hexdigest())
    return found


def _essence(message: Message, places: dict[str, int]) -> dict[str, Any]:
    """What makes a message the same; `places` has the numbers of the calls by their ids, and is continued."""
    essence = {name: value for name, value in message.items() if name != "reasoning_content"}
    content = essence.get("content") or ""
    if isinstance(content, list):
        content = [["image", part["image"].digest] if part["type"] == "image" else part["text"] for part in content]
    essence["content"] = content
    if calls := essence.pop("tool_calls", None):
        for call in calls:
            if call.get("id"):
                places[call["id"]] = len(places)
        essence["tool_calls"] = [[call["function"]["name"], _arguments(call["function"])] for call in calls]
    if name := essence.pop("tool_call_id", None):
        essence["tool_call"] = places.get(name, name)
    return essence
