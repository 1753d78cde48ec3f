"""Checks of configuration values, with one form of words for all of them.

A message names the setting, what it may be, and what was found: `optimizer: eps must be above 0, got -1e-08`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real

from rlhf_core.errors import ConfigError
from rlhf_core.options import nearest


def check_number(
    setting: str,
    value: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse what is not a finite number between the bounds; NaN and infinity never are.

    >>> check_number("optimizer: eps", 1e-8, above=0)

    Raises:
        ConfigError: names `setting` and what was found.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{setting} must be a finite number, got {value!r}")
    number = float(value)
    inside = (
        (at_least is None or number >= at_least)
        and (above is None or number > above)
        and (at_most is None or number <= at_most)
        and (below is None or number < below)
    )
    if not inside:
        bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
        allowed = " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)
        raise ConfigError(f"{setting} must be {allowed}, got {value!r}")


def check_whole(setting: str, value: object, *, at_least: int | None = None) -> None:
    """Refuse what is not a whole number, or is too small.

    Raises:
        ConfigError: names `setting` and what was found.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{setting} must be a whole number, got {value!r}")
    check_number(setting, value, at_least=at_least)


def check_switch(setting: str, value: object) -> None:
    """Refuse what is neither true nor false, the text "no" for instance, which Python takes for true.

    Raises:
        ConfigError: names `setting` and what was found.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{setting} must be true or false, got {value!r}")


def check_choice(setting: str, value: object, choices: Iterable[object]) -> None:
    """Refuse what is none of the choices.

    Raises:
        ConfigError: names `setting`, all choices and what was found, and the nearest choice.
    """
    known = list(choices)
    if isinstance(value, bool) or value not in known:
        close = nearest(str(value), [str(choice) for choice in known])
        hint = f"; did you mean {close!r}?" if close else ""
        raise ConfigError(f"{setting} must be one of {', '.join(map(str, known))}, got {value!r}{hint}")
