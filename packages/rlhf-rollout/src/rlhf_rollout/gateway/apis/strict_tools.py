"""Schemas that clients give, a part of JSON Schema: of tools with `strict`, whose calls count only if their
arguments fit, and of answers that are to be JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import DataError

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_REMARKS = {"title", "description", "default", "examples", "$schema", "$defs", "definitions", "$comment"}
_KNOWN = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref"),
    *_REMARKS,
}
_MOST_DEPTH = 32


def check_strict(schema: Any, what: str) -> None:
    """Refuse a schema with what `fits` does not look at.

    Args:
        schema: of a tool's arguments, or of an answer.
        what: it is, for messages.

    Raises:
        DataError: names it.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise DataError(f"{what}: a schema must be an object, got {str(schema)[:80]!r}")
    if unknown := set(schema) - _KNOWN:
        raise DataError(f"{what}: a schema takes no {', '.join(sorted(unknown))[:200]} here; leave it out")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise DataError(f"{what}: there is no type {str(kind)[:80]!r} in JSON Schema")
    for name, form in (("required", list), ("enum", list), ("anyOf", list), ("$ref", str)):
        if name in schema and not isinstance(schema[name], form):
            raise DataError(f"{what}: `{name}` of a schema must be a {form.__name__}")
    for name in ("properties", "$defs", "definitions"):
        inner = schema.get(name, {})
        if not isinstance(inner, Mapping):
            raise DataError(f"{what}: `{name}` of a schema must be an object")
        for part in inner.values():
            check_strict(part, what)
    for part in (*schema.get("anyOf", ()), schema.get("items", True), schema.get("additionalProperties", True)):
        check_strict(part, what)


def fits(value: Any, schema: Any, root: Any, depth: int = 0) -> bool:
    """Whether a value has the form that a schema of `check_strict` asks for; `root` is where references begin.

    >>> fits({"a": 1}, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {})
    True
    """
    if isinstance(schema, bool):
        return schema
    if depth > _MOST_DEPTH:
        return False
    if "$ref" in schema:
        target = _referred(schema["$ref"], root)
        if target is None or not fits(value, target, root, depth + 1):
            return False
    kinds = schema.get("type", list(_TYPES))
    return (
        any(_is(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds]))
        and ("enum" not in schema or any(_same(value, one) for one in schema["enum"]))
        and ("const" not in schema or _same(value, schema["const"]))
        and ("anyOf" not in schema or any(fits(value, one, root, depth + 1) for one in schema["anyOf"]))
        and (not isinstance(value, dict) or _object_fits(value, schema, root, depth))
        and (
            not isinstance(value, list)
            or all(fits(item, schema.get("items", True), root, depth + 1) for item in value)
        )
    )


def _object_fits(value: Mapping[str, Any], schema: Mapping[str, Any], root: Any, depth: int) -> bool:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(name in value for name in schema.get("required", ())) and all(
        fits(item, known.get(name, others), root, depth + 1) for name, item in value.items()
    )


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind]) or (
        kind == "integer" and isinstance(value, float) and value.is_integer()
    )


def _same(one: Any, other: Any) -> bool:
    # Python takes True and 1 for equal; JSON does not.
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _referred(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        if not isinstance(root, Mapping) or name not in root:
            return None
        root = root[name]
    return root if isinstance(root, Mapping | bool) else None
