"""Fields of configs that take one of a few names."""

from __future__ import annotations

from typing import Any, get_args

from rlhf_core import ConfigError, did_you_mean


def check_choices(what: str, config: object, **kinds: Any) -> None:
    """Refuse a field whose value is not among the values of its Literal.

    Args:
        what: names the config in messages.
        config: the config.
        kinds: field name to the `Literal` type of its values.

    Raises:
        ConfigError: names the field, the value and the choices.
    """
    for name, kind in kinds.items():
        value, known = getattr(config, name), get_args(kind)
        if value not in known:
            raise ConfigError(
                f"{what}: {name} {value!r} is unknown; {did_you_mean(str(value), map(str, known))}write one of "
                f"{', '.join(map(str, known))}"
            )
