"""Anthropic's Messages API: its requests as chat requests, and chat answers as its messages and events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rlhf_core import CapabilityError, DataError

_SAME = ("model", "messages", "max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request of the Messages API as one of the chat API.

    Raises:
        DataError: a field or a block of the wrong form.
        CapabilityError: a field that is not honoured here.
    """
    chat = {name: body[name] for name in _SAME if name in body}
    if "max_tokens" not in body:
        raise DataError("`max_tokens` is required")
    if not isinstance(body.get("messages"), list):
        raise DataError("`messages` must be a list with at least one message")
    system = _text(body["system"], "system") if "system" in body else ""
    chat["stream_options"] = {"include_usage": True}
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        chat["messages"] += _to_chat_messages(message)
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if "tools" in body:
        chat["tools"] = _tools(body["tools"])
    choice = body.get("tool_choice", {"type": "auto"})
    if choice not in ({"type": "auto"}, {"type": "none"}, {"type": "auto", "disable_parallel_tool_use": False}):
        raise CapabilityError(
            f'`tool_choice` can be {{"type": "auto"}} or {{"type": "none"}}, got {str(choice)[:200]!r}'
        )
    chat["tool_choice"] = choice["type"]
    if "output_config" in body:
        chat["response_format"] = _response_format(body["output_config"])
    metadata = body.get("metadata", {})
    if not isinstance(metadata, dict) or not set(metadata) <= {"user_id"}:
        raise DataError(f"`metadata` may have `user_id` alone, got {str(metadata)[:200]!r}")
    known = {*_SAME, "system", "stop_sequences", "tools", "tool_choice", "metadata", "output_config"}
    for name in body:
        if name not in known:
            raise CapabilityError(f"`{name[:100]}` is not supported; leave it out")
    return chat


def _response_format(asked: Any) -> dict[str, Any]:
    """`output_config` of a message as `response_format` of a chat."""
    form = asked.get("format") if isinstance(asked, Mapping) else None
    plain = isinstance(asked, Mapping) and not set(asked) - {"format", "effort"} and asked.get("effort") is None
    if plain and form is None:
        return {"type": "text"}
    if not plain or not isinstance(form, Mapping) or set(form) != {"type", "schema"}:
        raise CapabilityError(
            '`output_config` may have {"format": {"type": "json_schema", "schema": {...}}} alone, '
            f"got {str(asked)[:200]!r}"
        )
    return {"type": form["type"], "json_schema": {"schema": form["schema"]}}


def from_chat(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a chat request as a message of the Messages API."""
    (choice,) = answer["choices"]
    message = choice["message"]
    content: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        content.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        function = call["function"]
        content.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": json.loads(function["arguments"]),
            }
        )
    usage = answer["usage"]
    return _frame(answer, content, usage["prompt_tokens"], usage["completion_tokens"]) | _ending(choice)


async def events(chunks: AsyncIterator[Mapping[str, Any]], prompt_tokens: int) -> AsyncIterator[Mapping[str, Any]]:
    """The chunks of a chat answer, the last of which has the usage, as events of the Messages API."""
    block, index, ending, started = "", -1, {}, False
    async for chunk in chunks:
        if not started:
            started = True
            yield {"type": "message_start", "message": _frame(chunk, [], prompt_tokens, 0)}
        if not chunk["choices"]:
            usage = {"output_tokens": chunk["usage"]["completion_tokens"]}
            if block:
                yield {"type": "content_block_stop", "index": index}
            yield {"type": "message_delta", "delta": ending, "usage": usage}
            continue
        (choice,) = chunk["choices"]
        for kind, start, delta in _pieces(choice.get("delta", {})):
            # Every call is a block of its own.
            if kind != block or kind == "tool_use":
                if block:
                    yield {"type": "content_block_stop", "index": index}
                block, index = kind, index + 1
                yield {"type": "content_block_start", "index": index, "content_block": {"type": kind} | start}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        if choice["finish_reason"]:
            ending = _ending(choice)
    yield {"type": "message_stop"}


def _pieces(delta: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What a chunk adds: the kind of its block, how such a block begins, and the addition."""
    pieces: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    if thought := delta.get("reasoning_content"):
        added = {"type": "thinking_delta", "thinking": thought}
        pieces.append(("thinking", {"thinking": "", "signature": ""}, added))
    if text := delta.get("content"):
        pieces.append(("text", {"text": ""}, {"type": "text_delta", "text": text}))
    for call in delta.get("tool_calls", []):
        function = call["function"]
        begun = {"id": call["id"], "name": function["name"], "input": {}}
        pieces.append(("tool_use", begun, {"type": "input_json_delta", "partial_json": function["arguments"]}))
    return pieces


def _frame(answer: Mapping[str, Any], content: list[Any], prompt: int, sampled: int) -> dict[str, Any]:
    return {
        "id": answer["id"].replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt, "output_tokens": sampled},
    }


def _ending(choice: Mapping[str, Any]) -> dict[str, Any]:
    stop = choice.get("stop_reason")
    reason = "stop_sequence" if stop else _STOP_REASONS[choice["finish_reason"]]
    return {"stop_reason": reason, "stop_sequence": stop}


def _to_chat_messages(message: Any) -> list[dict[str, Any]]:
    """One message as chat messages: results of tools are messages of their own there."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
        raise DataError(f"a message must have the `role` user or assistant, got {str(message)[:200]!r}")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise DataError(f"a message's `content` must be a text or a list of blocks, got {str(content)[:200]!r}")
    results, parts, thoughts, calls = [], [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text" or (kind == "image" and role == "user"):
            parts.append(_part(block, "content"))
        elif kind == "tool_result" and role == "user" and isinstance(block.get("tool_use_id"), str):
            said = _content(block.get("content", ""), "tool_result")
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": said})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        else:
            raise DataError(
                "a block must be text, or image or tool_result in a message of the user, or thinking or tool_use "
                f"in one of the assistant, got {str(block)[:200]!r}"
            )
    if results and not parts:
        return results
    made: dict[str, Any] = {"role": role, "content": parts}
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return [*results, made]


def _content(content: Any, name: str) -> str | list[dict[str, Any]]:
    """The content of a result of a tool as that of a chat message."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"`{name}` must be a text or a list of blocks, got {str(content)[:200]!r}")
    return [_part(block, name) for block in content]


def _part(block: Any, name: str) -> dict[str, Any]:
    """A block of text or an image as a part of a chat message."""
    if not isinstance(block, Mapping) or block.get("type") != "image":
        return {"type": "text", "text": _text([block], name)}
    source = block.get("source")
    if (
        not isinstance(source, Mapping)
        or source.get("type") != "base64"
        or not all(isinstance(source.get(key), str) for key in ("media_type", "data"))
    ):
        raise DataError(
            'the `source` of an image must be {"type": "base64", "media_type": "image/png", "data": "..."}: '
            f"nothing is fetched; got {str(source)[:80]!r}"
        )
    return {"type": "image_url", "image_url": {"url": f"data:{source['media_type']};base64,{source['data']}"}}


def _text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise DataError(f"`{name}` must be a text or blocks of type `text`, got {str(content)[:200]!r}")


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise DataError(f"`tools` must be a list, got {str(tools)[:200]!r}")
    made = []
    for tool in tools:
        if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom" or "input_schema" not in tool:
            raise DataError(f"each of `tools` must have `name` and `input_schema`, got {str(tool)[:200]!r}")
        function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
        made.append({"type": "function", "function": function | _kept(tool, "description", "strict")})
    return made


def _kept(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if values.get(name) is not None}
