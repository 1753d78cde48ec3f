"""Structured output: what clients say of the form of an answer, as the JSON Schema that the engine keeps it to.

An engine compiles a schema before it samples, so only what `check_strict` knows is let through, and not much of it:
patterns and bounds of lengths can make grammars of any size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlhf_core import CapabilityError, DataError

from rlhf_rollout.gateway.apis.strict_tools import check_strict

_ANY_OBJECT = '{"type": "object"}'
_MOST_CHARACTERS = 16_384
_MOST_DEPTH = 32


def schema_of(body: Mapping[str, Any]) -> str:
    """The schema that `response_format` of a chat or completion request asks for, as text; empty for plain text.

    Raises:
        DataError: `response_format` has another form than OpenAI's.
        CapabilityError: a schema too large, or with a keyword that is not known here.
    """
    asked = body.get("response_format", {"type": "text"})
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind == "text" and len(asked) == 1:
        return ""
    if kind == "json_object" and len(asked) == 1:
        return _ANY_OBJECT
    form = asked.get("json_schema") if kind == "json_schema" and len(asked) == 2 else None
    known = {"name", "schema", "strict", "description"}
    if not isinstance(form, Mapping) or not isinstance(form.get("schema"), Mapping) or set(form) - known:
        raise DataError(
            '`response_format` can be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
            f'"json_schema": {{"name": ..., "schema": {{...}}}}}}, got {str(asked)[:200]!r}'
        )
    text = json.dumps(form["schema"]) if _depth(form["schema"]) <= _MOST_DEPTH else ""
    if not 0 < len(text) <= _MOST_CHARACTERS:
        raise CapabilityError(
            f"a schema of an answer may have {_MOST_CHARACTERS} characters and {_MOST_DEPTH} levels; simplify it"
        )
    check_strict(form["schema"], "`response_format`")
    return text


def _depth(value: Any) -> int:
    # An iteration: a client may send as many levels as a body holds.
    deepest, left = 0, [(value, 1)]
    while left:
        one, depth = left.pop()
        deepest = max(deepest, depth)
        if depth > _MOST_DEPTH:
            return depth
        inner = one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
        left += [(part, depth + 1) for part in inner]
    return deepest
