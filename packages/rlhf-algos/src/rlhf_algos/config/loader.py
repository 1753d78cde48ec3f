"""Frozen dataclasses from YAML files and dotted overrides: typed, and strict about unknown keys.

What a dataclass may say of itself:

- `short_form: ClassVar[str]`: the field that a plain value stands for (`model: PATH` for `model: {path: PATH}`).
- `renamed_keys: ClassVar[Mapping[str, str]]`: keys of earlier versions, dotted, and what to write instead.
- `from_keys(cls, data, source, prefix)` and `to_keys(self)`: a group whose keys depend on one of them.

A group of keys is laid over the field's default: `optimizer: {weight_decay: 0.1}` keeps the default's other values.
"""

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
        ignore: dotted keys of the file that are another command's.

    Raises:
        ConfigError: an unknown key (with the nearest valid one), a value of the wrong type, a missing key, or
            a file that cannot be read. The message has the file and the full dotted key.
    """
    data = {} if path is None else _without(read_yaml(path), ignore)
    data = _expanded(cls, data)
    source = "command line" if path is None else str(path)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r} is not of the form key=value, for instance seed=1")
        keys, value = key.strip().split("."), parse_yaml(text, f"override {override!r}")
        short = _short_form(_type_at(cls, keys))
        if short is not None and isinstance(value, str) and isinstance(_found(data, keys), Mapping | None):
            keys.append(short)
        _put(data, keys, value, override)
    refuse_renamed(data, getattr(cls, "renamed_keys", {}), source)
    return from_mapping(cls, data, source=source)


def _expanded(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """The data with every short form of a group written out, so that overrides can add to the group."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        inner = _type_at(cls, [str(key)])
        short = _short_form(inner)
        if short is not None and isinstance(value, str):
            value = {short: value}
        result[key] = _expanded(inner, value) if isinstance(value, Mapping) else value
    return result


def _type_at(cls: Any, keys: Sequence[str]) -> Any:
    """The dataclass of the group at these keys below `cls`; None if there is none."""
    for key in keys:
        if not dataclasses.is_dataclass(cls) or key not in _names(cls):  # type: ignore[arg-type]
            return None
        hint = typing.get_type_hints(cls)[key]
        members = get_args(hint) if get_origin(hint) in (Union, types.UnionType, tuple) else (hint,)
        groups = [member for member in members if dataclasses.is_dataclass(member)]
        cls = groups[0] if len(groups) == 1 else None
    return cls


def _found(data: Mapping[str, Any], keys: Sequence[str]) -> Any:
    found: Any = data
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _short_form(cls: Any) -> str | None:
    return getattr(cls, "short_form", None)


def _without(data: Mapping[str, Any], ignore: Collection[str], prefix: str = "") -> dict[str, Any]:
    kept = {key: value for key, value in data.items() if f"{prefix}{key}" not in ignore}
    return {
        key: _without(value, ignore, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in kept.items()
    }


def refuse_renamed(data: Mapping[str, Any], renamed: Mapping[str, str], source: str, prefix: str = "") -> None:
    """Refuse a key of an earlier version with the one that took its place.

    Keys of `renamed` are dotted; `*` stands for any name or place in a list. With `=` at their end they mean a
    value that is no group of keys.

    Raises:
        ConfigError: an old key is there.
    """
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        plain = "=" if not isinstance(value, Mapping) else ""
        for old in (dotted, dotted + plain):
            if (new := _renamed(old, renamed)) is not None:
                raise ConfigError(f"{source}: the key {dotted!r} has another name now; write {new}")
        inner = {str(i): item for i, item in enumerate(value)} if isinstance(value, list | tuple) else value
        if isinstance(inner, Mapping):
            refuse_renamed(inner, renamed, source, dotted + ".")


def _renamed(dotted: str, renamed: Mapping[str, str]) -> str | None:
    if dotted in renamed:
        return renamed[dotted]
    parts = dotted.split(".")
    for old, new in renamed.items():
        pattern = old.split(".")
        fits = "*" in pattern and len(pattern) == len(parts)
        if fits and all(want in ("*", part) for want, part in zip(pattern, parts, strict=True)):
            return new
    return None


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
    values = {
        key: _convert(hints[key], _over_default(fields[key], hints[key], value), source, prefix + key)
        for key, value in data.items()
    }
    try:
        return cls(**values)
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {_placed(str(error), prefix)}") from error


def _placed(message: str, prefix: str) -> str:
    """The message with the group's key before it, unless it says the key itself."""
    key = prefix.rstrip(".")
    named = not key or message.startswith((key, key.rpartition(".")[2]))
    return message if named else f"{key}: {message}"


def _over_default(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """A group of keys together with the values of the field's default that it does not name."""
    own_default = dataclasses.is_dataclass(hint) and field.default_factory is not dataclasses.MISSING
    if not own_default or not isinstance(value, Mapping) or hasattr(hint, "to_keys"):
        return value
    default: Any = field.default_factory()  # type: ignore[misc]
    return {item.name: getattr(default, item.name) for item in dataclasses.fields(default)} | dict(value)


def dump_config(config: Any) -> str:
    """YAML text that `load_config` turns back into an equal instance."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True, width=110)


def to_plain(value: Any) -> Any:
    """Nested dataclasses, tuples, mappings, enums and paths as plain dicts, lists and scalars."""
    if hasattr(value, "to_keys"):
        return to_plain(value.to_keys())
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
        short = getattr(hint, "short_form", None)
        if not isinstance(value, Mapping) and short is not None and value is not None:
            value = {short: value}
        if not isinstance(value, Mapping):
            raise _wrong(source, key, value, "a group of keys: " + ", ".join(_names(hint)))
        if (own := getattr(hint, "from_keys", None)) is not None:
            return own(value, source=source, prefix=key + ".")
        return from_mapping(hint, value, source=source, prefix=key + ".")
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, source, key)
    if not _holds_dataclass(hint):
        return _validate(hint, value, source, key)
    if origin in (tuple, list):
        if not isinstance(value, Sequence) or isinstance(value, str):
            value = (value,)  # one dataset is a list of one
        return tuple(_convert(args[0], item, source, f"{key}[{i}]") for i, item in enumerate(value))
    if isinstance(value, Mapping):
        return {name: _convert(args[1], item, source, f"{key}.{name}") for name, item in value.items()}
    raise _wrong(source, key, value, "named groups of keys")


def _convert_union(members: tuple[Any, ...], value: Any, source: str, key: str) -> Any:
    if value is None and type(None) in members:
        return None
    groups = [m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m)]
    if isinstance(value, tuple(groups)):
        return value
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
