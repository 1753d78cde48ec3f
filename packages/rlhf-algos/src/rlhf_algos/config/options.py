"""Configs from plain mappings, as files give them: an unknown key is an error that names the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from rlhf_core import ConfigError

Config = TypeVar("Config")


def from_options(kind: type[Config], options: Mapping[str, Any], *, what: str) -> Config:
    """An instance of the dataclass `kind` with these fields.

    Raises:
        ConfigError: a key is not a field of `kind`, or a value is refused by it.
    """
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"{what}: unknown key {key!r}; {hint}known are {', '.join(known)}")
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from error
