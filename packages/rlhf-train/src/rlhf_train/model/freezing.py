"""Parameters that are not trained, by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from rlhf_core import ConfigError


def freeze(model: Any, patterns: Sequence[str]) -> list[str]:
    """Freeze the parameters whose name matches one of the shell patterns; returns their names.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    frozen: list[str] = []
    for pattern in patterns:
        matches = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matches:
            some = ", ".join(list(parameters)[:3])
            raise ConfigError(
                f"engine options: freeze pattern {pattern!r} matches no parameter of {type(model).__name__}; names "
                f"are like {some}, so write for instance 'model.layers.0.*'"
            )
        frozen += matches
    for name in frozen:
        parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            f"engine options: freeze {list(patterns)} leaves nothing to train; give fewer patterns, or no optimizer"
        )
    return list(dict.fromkeys(frozen))
