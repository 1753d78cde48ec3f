"""The gateway's OpenAPI schema: what its endpoints take. What the schema allows may still be refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_rollout.gateway.apis.fields import MOST_CHOICES

Schema = Mapping[str, Any]

_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_SWITCH: Schema = {"type": "boolean"}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STOPS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 1024}, "maxItems": 64}
_TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_IMAGE_PART: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": {"type": "string", "pattern": "^data:image/"}, "detail": {"const": "auto"}},
            "required": ["url"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "image_url"],
}
_PARTS: Schema = {"type": "array", "items": _TEXT_PART}
_SHOWN: Schema = {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}}
"""Images are for a gateway with a processor."""


def _whole(least: int, most: int | None = None) -> Schema:
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _TEXT, "arguments": _TEXT},
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
_CONTENT: Schema = {"anyOf": [_TEXT, _SHOWN, {"type": "null"}]}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": _CONTENT,
        "reasoning_content": _TEXT,
        "tool_calls": {"type": "array", "items": _CALL},
        "tool_call_id": _TEXT,
        "name": _TEXT,
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
_FUNCTION: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "description": _TEXT, "parameters": _OBJECT},
    "required": ["name"],
}
_CHAT_TOOL: Schema = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_DRAWING: Mapping[str, Schema] = {
    "temperature": {"anyOf": [{"const": 0}, {"type": "number", "minimum": 0.01, "maximum": 100}]},
    "top_p": {"type": "number", "minimum": 1e-6, "maximum": 1},
    "top_k": _whole(-1, (1 << 31) - 1),
    "stream": _SWITCH,
}
_SAMPLING: Mapping[str, Schema] = {
    **_DRAWING,
    "n": _whole(1, MOST_CHOICES),
    "seed": _whole(0, (1 << 63) - 1 - MOST_CHOICES),
    "max_tokens": _whole(1),
    "min_tokens": _whole(0),
    "min_p": {"type": "number", "minimum": 0, "maximum": 0.999999},
    "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 100},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "stop": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 1024}, _STOPS]},
    "stop_token_ids": _TOKENS,
    "stream_options": {"type": "object", "properties": {"include_usage": _SWITCH}, "additionalProperties": False},
    "return_tokens_as_token_ids": _SWITCH,
    "response_format": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"enum": ["text", "json_object"]}},
                "required": ["type"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {
                    "type": {"const": "json_schema"},
                    "json_schema": {
                        "type": "object",
                        "properties": {"name": _TEXT, "schema": _OBJECT},
                        "required": ["name", "schema"],
                    },
                },
                "required": ["type", "json_schema"],
            },
        ]
    },
}
FIELDS: Mapping[str, Mapping[str, Schema]] = {
    "/v1/chat/completions": {
        **_SAMPLING,
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
        "tools": {"type": "array", "items": _CHAT_TOOL},
        "tool_choice": {"enum": ["auto", "none"]},
        "max_completion_tokens": _whole(1),
        "chat_template_kwargs": _OBJECT,
        "logprobs": _SWITCH,
    },
    "/v1/completions": {
        **_SAMPLING,
        "prompt": {"anyOf": [{"type": "string", "minLength": 1}, {**_TOKENS, "minItems": 1}]},
        "logprobs": _whole(0, 1),
    },
    "/v1/messages": {
        **_DRAWING,
        "max_tokens": _whole(1),
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "role": {"enum": ["user", "assistant"]},
                    "content": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]},
                },
                "required": ["role", "content"],
            },
        },
        "system": {"anyOf": [_TEXT, _PARTS]},
        "stop_sequences": _STOPS,
        "tools": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": _TEXT, "description": _TEXT, "input_schema": _OBJECT},
                "required": ["name", "input_schema"],
            },
        },
        "tool_choice": {
            "type": "object",
            "properties": {"type": {"enum": ["auto", "none"]}},
            "required": ["type"],
        },
        "metadata": {"type": "object", "properties": {"user_id": _TEXT}, "additionalProperties": False},
        "chat_template_kwargs": _OBJECT,
    },
    "/v1/responses": {
        **_DRAWING,
        "input": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]},
        "instructions": _TEXT,
        "max_output_tokens": _whole(1),
        "tools": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "function"}, **_FUNCTION["properties"]},
                "required": ["type", "name"],
            },
        },
        "tool_choice": {"enum": ["auto", "none"]},
        "chat_template_kwargs": _OBJECT,
    },
}
"""What each endpoint honours, by field."""
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/responses": ("input",),
}


def openapi(model: str) -> dict[str, Any]:
    """The schema of a gateway that serves `model`."""
    refused = {
        status: {"description": what, "content": {"application/json": {"schema": _OBJECT}}}
        for status, what in (
            ("400", "The request is wrong, or asks for what is not honoured; the answer says which."),
            ("401", "The key is missing or wrong."),
            ("403", "The session may do no more."),
            ("503", "The backend failed."),
        )
    }
    answered = {"200": {"description": "The answer.", "content": {"application/json": {"schema": _OBJECT}}}}
    paths: dict[str, Any] = {"/v1/models": {"get": {"responses": answered | {"401": refused["401"]}}}}
    for path, fields in FIELDS.items():
        body = {
            "type": "object",
            "properties": {"model": {"const": model}, **fields},
            "required": ["model", *REQUIRED[path]],
            "additionalProperties": False,
        }
        media = {"application/json": {"schema": body}}
        streamed = {"text/event-stream": {"schema": _TEXT}}
        content = {"content": answered["200"]["content"] | streamed}
        responses = {"200": answered["200"] | content, **refused}
        paths[path] = {"post": {"requestBody": {"required": True, "content": media}, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "rlhf-rollout gateway", "version": "1"},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
        "paths": paths,
    }
