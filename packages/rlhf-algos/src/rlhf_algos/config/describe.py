"""What a configuration class says of itself: comments in YAML, a JSON schema for editors, a reference page.

All three come from the docstrings under the fields, so that none of them can say something else than the code.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import itertools
import json
import textwrap
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml

from rlhf_algos.config.loader import to_plain

_WIDTH = 110


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line; its base classes' fields included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docs_of(base)
    return docs


def _docs_of(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # a class made in an interactive session has no source
        return {}
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for statement, following in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


@dataclasses.dataclass(frozen=True, slots=True)
class _Shown:
    """The part of a configuration that is written."""

    options: Mapping[str, Any]
    only: frozenset[str] | None

    def __contains__(self, key: str) -> bool:
        if self.only is None:
            return True
        return any(key == one or one.startswith(key + ".") or key.startswith(one + ".") for one in self.only)


def commented_yaml(
    config: Any, *, options: Mapping[str, Any] | None = None, only: Collection[str] | None = None
) -> str:
    """YAML text of a configuration with every key's meaning above it; `load_config` turns it back into an equal
    one.

    Args:
        config: an instance of a configuration class.
        options: dotted key of a group of free settings (`train.options`) to an instance of the class that reads
            them; its settings are shown as comments where the configuration says nothing of them.
        only: dotted keys to write; all if None.
    """
    lines: list[str] = []
    shown = _Shown(options or {}, None if only is None else frozenset(only))
    _write_group(lines, config, 0, "", shown)
    return "\n".join(lines) + "\n"


def _write_group(lines: list[str], config: Any, depth: int, prefix: str, shown: _Shown) -> None:
    docs, indent, hints = field_docs(type(config)), "  " * depth, _hints(type(config))
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if key not in shown:
            continue
        _comment(lines, _doc(docs.get(field.name, ""), hints[field.name]), indent)
        if hasattr(value, "to_keys"):
            _write_keys(lines, field.name, value, indent)
        elif dataclasses.is_dataclass(value):
            lines.append(f"{indent}{field.name}:")
            _write_group(lines, value, depth + 1, key + ".", shown)
        else:
            _write_value(lines, field.name, _shortened(value), indent)
            group = _optional_group(hints[field.name]) if value is None else shown.options.get(key)
            if group is not None:
                _write_commented_out(lines, field.name if value is None else None, group, indent, value)
        if depth == 0:
            lines.append("")


def _shortened(value: Any) -> Any:
    """A list of groups with the keys that differ from their defaults; anything else as it is."""
    groups = isinstance(value, tuple) and value and all(dataclasses.is_dataclass(item) for item in value)
    if not groups:
        return to_plain(value)
    written = []
    for item in value:
        named = {f.name: to_plain(getattr(item, f.name)) for f in dataclasses.fields(item)}
        own = {f.name: named[f.name] for f in dataclasses.fields(item) if not _is_default(f, getattr(item, f.name))}
        short: str = getattr(type(item), "short_form", "")
        written.append(own[short] if list(own) == [short] else own)
    return written[0] if len(written) == 1 else written


def _write_keys(lines: list[str], name: str, section: Any, indent: str) -> None:
    """A group whose keys depend on one of them: an algorithm and its settings, which `section.settings` holds."""
    lines.append(f"{indent}{name}:")
    docs: dict[str, str] = {}
    for cls in (type(section), type(section.settings)):
        if dataclasses.is_dataclass(cls):
            docs |= {key: _doc(text, _hints(cls).get(key)) for key, text in field_docs(cls).items()}
    for key, value in section.to_keys().items():
        _comment(lines, docs.get(key, ""), indent + "  ")
        _write_value(lines, key, to_plain(value), indent + "  ")


def _write_value(lines: list[str], name: str, value: Any, indent: str) -> None:
    if not isinstance(value, Mapping | list) or not value:
        lines.append(f"{indent}{name}: {_inline(value)}")
        return
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=_WIDTH, default_flow_style=None)
    block = text.rstrip("\n").splitlines()
    if len(block) == 1 and block[0].startswith(("[", "{")):
        lines.append(f"{indent}{name}: {block[0]}")
        return
    lines.append(f"{indent}{name}:")
    lines += [f"{indent}  {line}" for line in block]


def _write_commented_out(lines: list[str], name: str | None, group: Any, indent: str, given: Any) -> None:
    """The keys of a group that is not there, as comments to be taken out."""
    inner = indent + "#   "
    if name is not None:
        lines.append(f"{indent}# {name}:")
    cls = group if isinstance(group, type) else type(group)
    docs = field_docs(cls)
    for field in dataclasses.fields(cls):
        if isinstance(given, Mapping) and field.name in given:
            continue
        _comment(lines, docs.get(field.name, ""), inner)
        default = _default_of(field)
        shown = "..." if default is dataclasses.MISSING else _inline(to_plain(default))
        lines.append(f"{inner}{field.name}: {shown}")


def _inline(value: Any) -> str:
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)  # JSON is YAML
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(lines: list[str], text: str, indent: str) -> None:
    lines += (
        textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ") if text else []
    )


def _doc(text: str, hint: Any) -> str:
    """The docstring, followed by the choices where there are some that it does not name."""
    choices = [str(choice) for choice in _choices(hint)]
    if not choices or all(choice in text for choice in choices):
        return text
    return f"{text} One of {', '.join(choices)}.".strip()


def _choices(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is typing.Literal:
        return get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return tuple(member.value for member in hint)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(choice for member in get_args(hint) for choice in _choices(member))
    return ()


def _optional_group(hint: Any) -> type | None:
    """The dataclass of `Group | None`."""
    groups = [member for member in get_args(hint) if dataclasses.is_dataclass(member)]
    return groups[0] if len(groups) == 1 and isinstance(groups[0], type) else None


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = _default_of(field)
    return default is not dataclasses.MISSING and to_plain(default) == to_plain(value)


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def json_schema(cls: type, *, title: str) -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of a configuration class, for editors that complete and check YAML."""
    schema = _schema_of(cls)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}


def schema_text(cls: type, *, title: str) -> str:
    """`json_schema` as a file's content."""
    return json.dumps(json_schema(cls, title=title), indent=1) + "\n"


def _schema_of(hint: Any) -> dict[str, Any]:
    """The schema of a type; what it cannot say is left open."""
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _group_schema(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(member) for member in args]}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (tuple, list) and args:
        items = {"type": "array", "items": _schema_of(args[0])}
        short = getattr(args[0], "short_form", None)
        return {"anyOf": [_schema_of(args[0]), items]} if short else items
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping) and len(args) == 2:
        return {"type": "object", "additionalProperties": _schema_of(args[1])}
    simple = {str: "string", Path: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    if hint in simple:
        return {"type": simple[hint]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    return {}


def _group_schema(cls: type) -> dict[str, Any]:
    docs, hints = field_docs(cls), _hints(cls)
    properties: dict[str, Any] = {}
    required = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        schema = _schema_of(hints[field.name])
        default = _default_of(field)
        if default is dataclasses.MISSING:
            required.append(field.name)
        elif not dataclasses.is_dataclass(default):
            schema = {**schema, "default": to_plain(default)}
        properties[field.name] = {"description": docs[field.name], **schema} if field.name in docs else schema
    # A group whose keys depend on one of them takes any beside those it names.
    group = {"type": "object", "properties": properties, "additionalProperties": hasattr(cls, "to_keys")}
    if required:
        group["required"] = required
    short = getattr(cls, "short_form", None)
    return {"anyOf": [group, {"type": "string"}]} if short else group


def reference(cls: type, *, heading: str, intro: Sequence[str] = ()) -> str:
    """A Markdown page with a table of every group's keys: type, default, meaning."""
    lines = [f"# {heading}", "", *intro, ""] if intro else [f"# {heading}", ""]
    lines += ["Made from the docstrings of the configuration classes; do not edit.", ""]
    top: list[tuple[str, type]] = [("", cls)]
    seen: set[tuple[str, type]] = set()
    while top:
        prefix, group = top.pop(0)
        if (prefix, group) in seen:
            continue
        seen.add((prefix, group))
        lines += _table(prefix, group)
        top[:0] = [(f"{prefix}{name}.", inner) for name, inner in _groups_of(group)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(prefix: str, group: type) -> list[str]:
    docs, hints = field_docs(group), _hints(group)
    title = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
    lines = [f"## {title}", "", " ".join((inspect.getdoc(group) or "").split()), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(group):
        if not field.init:
            continue
        default = _default_of(field)
        if default is dataclasses.MISSING:
            shown = "required"
        elif dataclasses.is_dataclass(default):
            shown = "see below"
        else:
            shown = f"`{_inline(to_plain(default))}`"
        kind = _kind(hints[field.name]).replace("|", "\\|")
        meaning = docs.get(field.name, "").replace("|", "\\|")
        lines.append(f"| `{prefix}{field.name}` | {kind} | {shown} | {meaning} |")
    return [*lines, ""]


def _groups_of(group: type) -> list[tuple[str, type]]:
    """Fields that are groups of keys, or named or listed groups of one kind."""
    found = []
    for field in dataclasses.fields(group):
        hint = _hints(group)[field.name]
        members = [hint, *get_args(hint)]
        inner = [m for m in members if dataclasses.is_dataclass(m) and isinstance(m, type)]
        if len(inner) == 1:
            many = get_origin(hint) is not None and get_origin(hint) not in (Union, types.UnionType)
            found.append((f"{field.name}.*" if many else field.name, inner[0]))
    return found


def _kind(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(member) for member in args)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if dataclasses.is_dataclass(hint):
        return "group"
    if origin in (tuple, list):
        return f"list of {_kind(args[0])}s"
    if origin is not None:
        return "named settings"
    names = {
        str: "text",
        Path: "path",
        bool: "true or false",
        int: "whole number",
        float: "number",
        type(None): "null",
    }
    return names.get(hint, "any")
