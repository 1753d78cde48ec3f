"""YAML as configuration needs it: `3e-5` is a number, a key given twice is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from rlhf_core import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's floats and without silent duplicates."""


# YAML 1.1 wants a dot in "3.0e-5"; without this resolver "3e-5" would be text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is given twice", key_node.start_mark
            )
        seen.add(key)
    loader.flatten_mapping(node)
    return yaml.constructor.SafeConstructor.construct_mapping(loader, node, deep=deep)


def _construct(loader: _Loader, node: yaml.MappingNode) -> Any:
    result: dict[Any, Any] = {}
    yield result
    result.update(_mapping(loader, node))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct)


def parse_yaml(text: str, where: str) -> Any:
    """The value that `text` stands for.

    Raises:
        ConfigError: it is not YAML; says where.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{where}{line}: not valid YAML: {problem}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: the file is missing, unreadable or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file {str(path)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}") from None
    data = parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values, found a {type(data).__name__}")
    return data
