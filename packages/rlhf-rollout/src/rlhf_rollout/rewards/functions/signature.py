"""What a user's reward function takes, read from its parameters before it is ever called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core import PluginError

HOW_TO = (
    "write it as `def reward(completion: str, prompt: str, **columns) -> float` (one sample per call) or "
    "`def reward(completions: list[str], prompts: list[str], **columns) -> list[float]` (a whole batch)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSignature:
    """What a reward function takes, read from its parameters."""

    batched: bool
    """True if it gets lists for the whole batch, False if it is called once per sample."""
    columns: frozenset[str]
    """Columns it names, besides text and prompt."""
    required: frozenset[str]
    """Those without a default: the data must have them."""
    any_columns: bool
    """True if it takes `**columns`: it then gets every column there is."""


def read_signature(
    function: Callable[..., Any], *, name: str, bound: frozenset[str] = frozenset()
) -> RewardSignature:
    """Tell how a reward function wants to be called; `bound` parameters have their value already.

    >>> read_signature(lambda completions, answer: [], name="f").required
    frozenset({'answer'})
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise PluginError(f"the signature of reward function {name} cannot be read ({error}); {HOW_TO}") from error
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise PluginError(
            f"reward function {name} takes {positional[0]!r} by position only, but is called by keyword; {HOW_TO}"
        )
    texts = by_name & {"completion", "completions"}
    if len(texts) != 1:
        raise PluginError(
            f"reward function {name} must have exactly one of the parameters `completion` and `completions`, got "
            f"({', '.join(str(p) for p in parameters)}); {HOW_TO}"
        )
    batched = "completions" in texts
    columns = by_name - texts - bound
    required = {p.name for p in parameters if p.name in columns and p.default is p.empty}
    if not batched and "prompts" in required:
        raise PluginError(
            f"reward function {name} mixes `completion` (one sample) with `prompts` (a batch); {HOW_TO}"
        )
    return RewardSignature(
        batched=batched,
        columns=frozenset(columns),
        required=frozenset("prompt" if column == "prompts" else column for column in required),
        any_columns=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def with_options(
    function: Callable[..., Any], options: Mapping[str, Any], *, name: str
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """The function with its options filled in."""
    if not options:
        return function, options
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise PluginError(f"the signature of reward function {name} cannot be read ({error})") from error
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if unknown := sorted(set(options) - known):
        raise PluginError(
            f"reward function {name} has no option {unknown[0]!r}; it has {', '.join(sorted(known)) or 'none'}"
        )
    return functools.partial(function, **options), options


def check_renamed(columns: Mapping[str, str], signature: RewardSignature, *, name: str) -> dict[str, str]:
    """Which column a parameter takes, checked against the parameters that there are."""
    unknown = set(columns) - signature.columns
    if unknown and not signature.any_columns:
        parameter = min(unknown)
        raise PluginError(
            f"reward function {name} has no parameter {parameter!r} to take the column {columns[parameter]!r}; "
            f"it has {', '.join(sorted(signature.columns)) or 'none'}"
        )
    return dict(columns)
