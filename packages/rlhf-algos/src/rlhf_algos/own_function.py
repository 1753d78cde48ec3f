"""Functions that users bring at `module:function`, and the configs that these declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from rlhf_core import ConfigError, config_from, load_object


def load_own_function(
    path: str, *, what: str, parameters: tuple[str, ...]
) -> tuple[Callable[..., Any], type | None]:
    """The function at `module:function`, and the dataclass that annotates its last parameter, if one does.

    Args:
        path: `module:function`.
        what: names it in messages, for instance `policy loss`.
        parameters: what the function takes; the last one is its config.

    Raises:
        PluginError: the function cannot be imported.
        ConfigError: it is no function, or takes another number of parameters.
    """
    found = load_object(path, what=what)
    wanted = ", ".join(parameters)
    if isinstance(found, type) or not callable(found):
        raise ConfigError(f"{what} {path!r} is a {type(found).__name__}; write a function ({wanted})")
    function: Any = found
    names = list(inspect.signature(function).parameters)
    if len(names) != len(parameters):
        raise ConfigError(
            f"{what} {path!r} takes {len(names)} parameters ({', '.join(names)}); it must take "
            f"{len(parameters)}: {wanted}"
        )
    hint = get_type_hints(function).get(names[-1])
    return function, hint if isinstance(hint, type) and is_dataclass(hint) else None


def own_config(kind: type | None, options: Mapping[str, Any], *, what: str) -> Any:
    """The options as an instance of `kind`, or as a dict where the function declares no dataclass."""
    return dict(options) if kind is None else config_from(kind, options, what=what)
