"""Paths that mean the same wherever they are read: workers on a cluster have another working directory."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

Config = TypeVar("Config")

_MODELS = ("path", "reference", "critic", "teacher", "tokenizer", "chat_template")


def absolute_path(path: str) -> str:
    """A file or directory of this machine by its absolute path; a hub name as it is."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def with_absolute_paths(config: Config) -> Config:
    """A run's configuration with absolute paths of its output, its models and its cache."""
    given: Any = config
    model = given.model
    named = {name: value for name in _MODELS if (value := getattr(model, name)) is not None}
    changes: dict[str, Any] = {
        "output": Path(given.output).absolute(),
        "model": replace(model, **{name: absolute_path(value) for name, value in named.items()}),
    }
    if "reference_cache" in {item.name for item in fields(given)} and given.reference_cache is not None:
        changes["reference_cache"] = given.reference_cache.absolute()
    return replace(given, **changes)
