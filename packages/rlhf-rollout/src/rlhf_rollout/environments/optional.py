"""Packages that an environment needs and that are installed by those who use it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlhf_core import ConfigError


def optional_module(name: str, *, install: str, needed_by: str) -> Any:
    """Import a module.

    Args:
        name: the module.
        install: what pip is to install, for the message.
        needed_by: the class that is configured.

    Raises:
        ConfigError: the module is not installed, or one that it needs.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{needed_by} needs {name}, which cannot be imported ({error}): install {install}"
        ) from error
