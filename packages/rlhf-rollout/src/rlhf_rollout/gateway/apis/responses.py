"""OpenAI's Responses API: its requests as chat requests, and chat answers as its responses and events.

Nothing is kept between requests: `store` and `previous_response_id` are refused, the input is all that was said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import CapabilityError, DataError

_SAME = (
    *("model", "temperature", "top_p", "top_k", "stream", "user", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "metadata", "service_tier", "tool_choice", "top_logprobs", "chat_template_kwargs"),
)
_AS_IT_IS: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "store": (False,),
    "truncation": ("disabled",),
}
_TEXT_PARTS = ("input_text", "output_text", "text")


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request of the Responses API as one of the chat API.

    Raises:
        DataError: a field or an item of the wrong form.
        CapabilityError: a field that is not honoured here.
    """
    for name, value in body.items():
        if name in ("previous_response_id", "conversation") or (name == "store" and value is True):
            raise CapabilityError(
                f"`{name}` is not supported: nothing is kept; send the whole conversation as `input`"
            )
        if name in _AS_IT_IS and value not in _AS_IT_IS[name]:
            raise CapabilityError(f"`{name}` is not supported, got {str(value)[:200]!r}; leave it out")
        if name not in (*_SAME, *_AS_IT_IS, "input", "instructions", "max_output_tokens", "text", "tools"):
            raise CapabilityError(f"`{name[:100]}` is not supported; leave it out")
    chat = {name: body[name] for name in _SAME if name in body}
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if "tools" in body:
        chat["tools"] = _tools(body["tools"])
    if "text" in body:
        chat["response_format"] = _response_format(body["text"])
    instructions = body.get("instructions", "")
    if not isinstance(instructions, str):
        raise DataError(f"`instructions` must be a text, got {str(instructions)[:200]!r}")
    said = body.get("input")
    items = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(items, list):
        raise DataError(f"`input` must be a text or a list of items, got {str(items)[:200]!r}")
    chat["messages"] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        _add(chat["messages"], item)
    return chat


def _response_format(text: Any) -> dict[str, Any]:
    """`text` of a response as `response_format` of a chat."""
    if not isinstance(text, Mapping) or set(text) - {"format"} or not isinstance(text.get("format", {}), Mapping):
        raise CapabilityError(f"`text` may have `format` alone, got {str(text)[:200]!r}")
    form = dict(text.get("format") or {"type": "text"})
    if form.get("type") != "json_schema":
        return form
    return {"type": form.pop("type"), "json_schema": form}


def from_chat(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a chat request as a response."""
    (choice,) = answer["choices"]
    message, name = choice["message"], answer["id"].removeprefix("chatcmpl-")
    output: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        output.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    calls = message.get("tool_calls", [])
    whole = "incomplete" if choice["finish_reason"] == "length" else "completed"
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": []}
        frame = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": whole}
        output.append(frame | {"content": [part]})
    for call in calls:
        told = {"id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        output.append({"type": "function_call"} | told | call["function"])
    usage = answer["usage"]
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": answer["created"],
        "status": whole,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if whole == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": answer["model"],
        "output": output,
        "parallel_tool_calls": True,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def events(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A complete response as the events of a stream."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    made: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty = {"content": []} if "content" in item else {"arguments": ""}
        added = {**item, "status": "in_progress"} | empty
        made.append({"type": "response.output_item.added", "output_index": index, "item": added})
        if item["type"] == "function_call":
            arguments = item["arguments"]
            made.append({"type": "response.function_call_arguments.delta", "delta": arguments} | at)
            done = {"arguments": arguments, "name": item["name"]}
            made.append({"type": "response.function_call_arguments.done"} | done | at)
        else:
            made += _part_events(item["content"][0], at | {"content_index": 0})
        made.append({"type": "response.output_item.done", "output_index": index, "item": item})
    made.append({"type": f"response.{response['status']}", "response": response})
    return [event | {"sequence_number": number} for number, event in enumerate(made)]


def _part_events(part: Mapping[str, Any], at: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind = f"response.{part['type']}"
    extra = {"logprobs": []} if part["type"] == "output_text" else {}
    return [
        {"type": "response.content_part.added", "part": {**part, "text": ""}, **at},
        {"type": f"{kind}.delta", "delta": part["text"], **extra, **at},
        {"type": f"{kind}.done", "text": part["text"], **extra, **at},
        {"type": "response.content_part.done", "part": part, **at},
    ]


def _add(messages: list[dict[str, Any]], item: Any) -> None:
    """Add an item of the input: reasoning, text and calls that follow each other are one turn of the assistant."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        if item.get("role") == "assistant":
            turn = _turn(messages)
            turn["content"] = (turn["content"] or "") + _text(item.get("content"))
        else:
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning" and isinstance(item.get("content", []), list):
        parts = item.get("content") or []
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            raise DataError(f"`content` of reasoning must be parts with a `text`, got {str(item)[:200]!r}")
        thought = "".join(part["text"] for part in parts)
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        raise DataError(
            "an item of `input` must be message, function_call, function_call_output or reasoning, got "
            f"{str(item)[:200]!r}"
        )


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(content: Any) -> str | list[dict[str, Any]]:
    """The content of a message or of a tool's output as that of a chat message."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, Mapping) and part.get("type") == "input_image" for part in parts):
        return _text(content)
    return [_part(part) for part in parts]


def _part(part: Any) -> dict[str, Any]:
    if not isinstance(part, Mapping) or part.get("type") != "input_image":
        return {"type": "text", "text": _text([part])}
    if part.get("file_id") is not None:
        raise DataError(
            "`file_id` of an image is not supported: nothing is kept; send it as `image_url` with its data"
        )
    return {"type": "image_url", "image_url": {"url": part.get("image_url"), "detail": part.get("detail")}}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise DataError(f"`content` and `output` must be text, or parts of text and images, got {str(content)[:200]!r}")


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise DataError(f"`tools` must be a list, got {str(tools)[:200]!r}")
    made = []
    for tool in tools:
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise DataError(f"each of `tools` must have the type function, got {str(tool)[:200]!r}")
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        made.append({"type": "function", "function": function})
    return made
