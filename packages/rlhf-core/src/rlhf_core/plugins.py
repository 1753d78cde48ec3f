"""Finding backends, engines and functions by name, without importing what is not used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from rlhf_core.errors import PluginError
from rlhf_core.options import did_you_mean, nearest

ROLLOUT_BACKENDS = "rlhf.rollout_backends"
TRAIN_ENGINES = "rlhf.train_engines"


@runtime_checkable
class NeedsEnvVars(Protocol):
    """A backend's or engine's class whose processes need variables (threads, devices) before they start."""

    @staticmethod
    def env_vars(config: Any) -> Mapping[str, str]:
        """The environment variables of a process that will hold one of this configuration."""
        ...


def env_vars_of(plugin: Any, config: Any) -> dict[str, str]:
    """What a backend's or engine's class wants in its process's environment; empty if it asks for nothing."""
    return dict(plugin.env_vars(config)) if isinstance(plugin, NeedsEnvVars) else {}


@runtime_checkable
class DescribesOptions(Protocol):
    """A backend's or engine's class that says which dataclass describes its `options`."""

    options_type: type


def plugin_names(group: str) -> list[str]:
    """Names registered in an entry-point group, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load_plugin(group: str, name: str) -> Any:
    """The object registered as `name` in `group`, or the one at a `module:attribute` path.

    Raises:
        PluginError: there is no such name (the nearest ones are given), or importing it fails.
    """
    if ":" in name:
        return load_object(name, what=f"plugin of group {group}")
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    if not found:
        known = plugin_names(group)
        raise PluginError(
            f"no {name!r} in the entry-point group {group!r}: {did_you_mean(name, known)}installed are "
            f"{', '.join(known) or 'none'}; install the package that registers it, "
            "or give a 'module:attribute' path"
        )
    try:
        return found[0].load()
    except Exception as error:
        raise PluginError(
            f"{name!r} of group {group!r} ({found[0].value}) cannot be imported: {type(error).__name__}: {error}"
        ) from error


def load_object(path: str, *, what: str) -> Any:
    """Import `module:attribute`; the current directory counts as importable.

    Raises:
        PluginError: the path is malformed, the module cannot be imported, or it has no such attribute.
    """
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise PluginError(f"{what}: {path!r} is not of the form 'module:function', for instance 'my_rewards:score'")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:
        raise PluginError(
            f"{what}: module {module_name!r} of {path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [name for name in vars(value) if not name.startswith("_")]
            close = nearest(part, public)
            hint = f"; did you mean {close!r}?" if close else ""
            raise PluginError(f"{what}: {module_name!r} has no attribute {part!r}{hint}")
        value = getattr(value, part)
    return value
