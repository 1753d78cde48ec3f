"""Frozen dataclasses from YAML files and dotted overrides: typed, and strict about unknown keys."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from rlhf_core import ConfigError

from rlhf_algos.config.yaml_files import parse_yaml, read_yaml

T = TypeVar("T")


def load_config(
    cls: type[T], path: Path | None, overrides: Sequence[str] = (), *, ignore: Collection[str] = ()
) -> T:
    """An instance of the dataclass `cls` from a YAML file and overrides such as `optimizer.learning_rate=3e-5`.

    Args:
        cls: a dataclass; its fields may be dataclasses, Optional, Literal, enums, tuples and mappings of these.
        path: the YAML file; None starts from the defaults.
        overrides: `dotted.key=value`, the value read as YAML. Later ones win.
        ignore: top-level keys of the file that are another command's.

    Raises:
        ConfigError: an unknown key (with the nearest valid one), a value of the wrong type, a missing key, or
            a file that cannot be read. The message has the file and the full dotted key.
    """
    data = {} if path is None else {key: v for key, v in read_yaml(path).items() if key not in ignore}
    source = "command line" if path is None else str(path)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r} is not of the form key=value, for instance seed=1")
        _put(data, key.strip().split("."), parse_yaml(text, f"override {override!r}"), override)
    return from_mapping(cls, data, source=source)


def from_mapping(cls: type[T], data: Mapping[str, Any], *, source: str, prefix: str = "") -> T:
    """An instance of the dataclass `cls` from nested mappings; `source` and `prefix` go into error messages.

    Raises:
        ConfigError: see `load_config`.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise ConfigError(f"{source}: unknown key {prefix + str(key)!r}; {_nearest(str(key), fields, prefix)}")
    missing = [
        prefix + name
        for name, field in fields.items()
        if name not in data
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{source}: missing {', '.join(missing)}; write {missing[0]}: <value>")
    values = {key: _convert(hints[key], value, source, prefix + key) for key, value in data.items()}
    try:
        return cls(**values)
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {prefix and prefix.rstrip('.') + ': '}{error}") from error


def dump_config(config: Any) -> str:
    """YAML text that `load_config` turns back into an equal instance."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True, width=110)


def to_plain(value: Any) -> Any:
    """Nested dataclasses, tuples, mappings, enums and paths as plain dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _put(data: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys[:-1]):
        inner = data.get(key)
        if inner is None:
            inner = data[key] = {}
        elif not isinstance(inner, dict):
            raise ConfigError(
                f"override {override!r}: {'.'.join(keys[: depth + 1])!r} is {inner!r}, not a group of keys"
            )
        data = inner
    data[keys[-1]] = value


def _nearest(key: str, known: Mapping[str, Any], prefix: str) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {prefix + close[0]!r}? " if close else ""
    return f"{hint}valid keys{' of ' + prefix.rstrip('.') if prefix else ''} are {', '.join(sorted(known))}"


def _convert(hint: Any, value: Any, source: str, key: str) -> Any:
    """`value` as the annotated type `hint`."""
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise _wrong(source, key, value, "a group of keys: " + ", ".join(_names(hint)))
        return from_mapping(hint, value, source=source, prefix=key + ".")
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, source, key)
    if not _holds_dataclass(hint):
        return _validate(hint, value, source, key)
    if origin in (tuple, list) and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_convert(args[0], item, source, f"{key}[{i}]") for i, item in enumerate(value))
    if isinstance(value, Mapping):
        return {name: _convert(args[1], item, source, f"{key}.{name}") for name, item in value.items()}
    raise _wrong(source, key, value, "a list of groups" if origin in (tuple, list) else "named groups of keys")


def _convert_union(members: tuple[Any, ...], value: Any, source: str, key: str) -> Any:
    if value is None and type(None) in members:
        return None
    groups = [m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m)]
    if not isinstance(value, Mapping) or not groups:
        plain = tuple(m for m in members if m not in groups)
        if plain and not any(_holds_dataclass(m) for m in plain):
            return _validate(Union[plain], value, source, key)  # noqa: UP007
        rest = [m for m in plain if m is not type(None)]
        return _convert(rest[0] if rest else groups[0], value, source, key)
    if len(groups) == 1:
        return _convert(groups[0], value, source, key)
    kinds = {kind: group for group in groups for kind in _kinds(group)}
    kind = value.get("kind")
    if kind not in kinds:
        raise _wrong(source, key + ".kind", kind, "one of " + ", ".join(sorted(kinds)))
    return _convert(kinds[kind], value, source, key)


def _kinds(group: type) -> tuple[str, ...]:
    """Values of the Literal field `kind` by which a union of dataclasses is told apart."""
    return get_args(typing.get_type_hints(group).get("kind"))


def _holds_dataclass(hint: Any) -> bool:
    if dataclasses.is_dataclass(hint):
        return True
    return any(_holds_dataclass(arg) for arg in get_args(hint) if not isinstance(arg, str))


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _validate(hint: Any, value: Any, source: str, key: str) -> Any:
    allows_bool = hint is Any or bool in (hint, *get_args(hint))
    if isinstance(value, bool) and not allows_bool and get_origin(hint) is not typing.Literal:
        raise _wrong(source, key, value, _describe(hint))
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        found = error.errors()[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"])
        inner = where if get_origin(hint) in (tuple, list, dict, Mapping) else ""
        raise _wrong(source, key + inner, found["input"] if inner else value, _describe(hint)) from None


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    if origin in (Union, types.UnionType):
        return " or ".join("nothing (null)" if arg is type(None) else _describe(arg) for arg in args)
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "text", Path: "a path"}
    if hint in names:
        return names[hint]
    if origin is tuple:
        inner = args[:1] if args[-1] is Ellipsis else args
        return "a list of " + ", ".join(_describe(arg) for arg in inner)
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def _wrong(source: str, key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{source}: {key} must be {expected}; found {value!r} ({type(value).__name__})")
