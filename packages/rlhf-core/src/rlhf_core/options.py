"""Names and keys that people write: what they probably meant, and frozen dataclasses from plain mappings."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from rlhf_core.errors import ConfigError

Config = TypeVar("Config")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, or None where none is like it.

    >>> nearest("lerning_rate", ["learning_rate", "rank"]), nearest("xyz", ["learning_rate", "rank"])
    ('learning_rate', None)
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The beginning of an error's advice, with a space behind it; empty where no known name is like `name`.

    >>> did_you_mean("grop", ["grpo", "ppo"]), did_you_mean("xyz", ["grpo", "ppo"])
    ("did you mean 'grpo'? ", '')
    """
    close = nearest(name, known)
    return "" if close is None else f"did you mean {close!r}? "


def config_from(cls: type[Config], options: Mapping[str, Any], *, what: str) -> Config:
    """An instance of the dataclass `cls` with the given fields.

    Args:
        cls: a dataclass, which checks its values in `__post_init__`.
        options: its fields by name, as a file or a command line gives them. Lists become tuples.
        what: names the mapping in messages, for instance `train.options`.

    Raises:
        ConfigError: a key is not a field of `cls`, a field without a default is missing, or a value is refused.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in options:
        if key not in fields:
            raise ConfigError(
                f"{what}: unknown key {key!r}; {did_you_mean(str(key), fields)}known are "
                f"{', '.join(sorted(fields))}"
            )
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in options:
            raise ConfigError(f"{what}: {name!r} is missing; write {name}: <value>")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from error
