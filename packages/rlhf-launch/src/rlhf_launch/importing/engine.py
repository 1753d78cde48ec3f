"""One engine that turns foreign settings into a configuration of ours, by a table.

A table has a `Rule` for each foreign setting: our key and how the value is converted, or why there is none. What
depends on several settings at once is a function of the framework, which reads values from the `Draft` and writes
our keys into it. No setting is left without an entry in the account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlhf_core import ConfigError, did_you_mean


class Outcome(StrEnum):
    """What became of a foreign setting."""

    EXACT = "mapped"
    NOTED = "mapped, with a difference"
    MEANINGLESS = "not needed here"
    UNAVAILABLE = "not available"
    UNKNOWN = "unknown"


LEFT_OUT = (Outcome.UNAVAILABLE, Outcome.UNKNOWN)
"""Outcomes that make an import a partial one."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A foreign setting -> our keys, the conversion of its value, and a note."""

    outcome: Outcome = Outcome.EXACT
    keys: tuple[str, ...] = ()
    """Our dotted keys, which get the converted value; none for a setting that is read together with others."""
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""
    """How our semantics differ, why it is not needed, or what to write instead."""
    neutral: tuple[Any, ...] = ()
    """Values at which the setting asks for nothing: they end as mapped, and nothing is written."""


def to(*keys: str, convert: Callable[[Any], Any] = lambda value: value, neutral: tuple[Any, ...] = ()) -> Rule:
    """A setting with the same meaning at `keys`."""
    return Rule(keys=keys, convert=convert, neutral=neutral)


def differs(note: str, *keys: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """A setting at `keys` that does not mean quite the same."""
    return Rule(outcome=Outcome.NOTED, keys=keys, convert=convert, note=note)


def combined(note: str = "", neutral: tuple[Any, ...] = ()) -> Rule:
    """A setting that the framework's function reads together with others."""
    return Rule(outcome=Outcome.NOTED if note else Outcome.EXACT, note=note, neutral=neutral)


def needless(why: str) -> Rule:
    """A setting that asks for what happens here anyway, or for nothing that there is here."""
    return Rule(outcome=Outcome.MEANINGLESS, note=why)


def missing(instead: str, neutral: tuple[Any, ...] = ()) -> Rule:
    """A setting that we have nothing for, except at its `neutral` values."""
    return Rule(outcome=Outcome.UNAVAILABLE, note=instead, neutral=neutral)


@dataclass(frozen=True)
class Finding:
    """One line of the account."""

    setting: str
    """As it was written."""
    value: Any
    outcome: Outcome
    note: str = ""


@dataclass
class Draft:
    """A configuration of ours in the making, and the account of where each foreign setting went."""

    given: Mapping[str, Any]
    """Foreign settings by canonical name."""
    written: Mapping[str, str]
    """Canonical name -> the spelling that was used."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Their values where a command line says nothing."""
    settings: dict[str, Any] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    """By canonical name."""
    remarks: list[str] = field(default_factory=list)
    """What to look at besides the settings."""
    unwritten: list[str] = field(default_factory=list)
    """Parts of the run that no setting of theirs says in a way that we could take: to be written by hand."""

    def value(self, name: str, otherwise: Any = None) -> Any:
        """What was given, else their default, else `otherwise`."""
        return self.given.get(name, self.defaults.get(name, otherwise))

    def on(self, name: str) -> bool:
        """Whether a switch is set."""
        return self.value(name) not in (None, False, "", "None", "none", "null")

    def put(self, key: str, value: Any) -> None:
        """Set our dotted key."""
        *path, last = key.split(".")
        group = self.settings
        for part in path:
            inner = group.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{key}: {part!r} has the value {inner!r} already, which is not a group")
            group = inner
        group[last] = value

    def take(self, key: str) -> Any:
        """The value at our dotted key; None without one."""
        found: Any = self.settings
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def record(self, name: str, outcome: Outcome, note: str = "") -> None:
        """Say what became of a setting; passed over if it was not given."""
        if name in self.given:
            self.findings[name] = Finding(self.written[name], self.given[name], outcome, note)

    def noted(self, name: str, note: str) -> None:
        """The setting was mapped, with a difference."""
        self.record(name, Outcome.NOTED, note)

    def refused(self, name: str, instead: str) -> None:
        """There is nothing for the setting."""
        self.record(name, Outcome.UNAVAILABLE, instead)


def apply_table(draft: Draft, table: Mapping[str, Rule]) -> None:
    """Put every setting of `draft` that the table has under our keys, and an entry for each into the account.

    Their defaults are put, too, where a rule names one of our keys: ours may be others.

    Raises:
        ConfigError: a value cannot be converted; the message names the setting.
    """
    for name in dict.fromkeys([*draft.defaults, *draft.given]):
        rule = table.get(name)
        if rule is None:
            near = did_you_mean(draft.written.get(name, name), [*table])
            draft.record(name, Outcome.UNKNOWN, f"no setting of this name is known; {near}".rstrip("; "))
            continue
        value = draft.value(name)
        if value in rule.neutral or (value is None and name not in draft.given):
            draft.record(name, Outcome.EXACT)
            continue
        try:
            converted = rule.convert(value)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{draft.written.get(name, name)}: the value {value!r} cannot be read: {error}"
            ) from error
        for key in rule.keys:
            draft.put(key, converted)
        draft.record(name, rule.outcome, rule.note)


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Around what reads several values together: one that is no number, say, is the writer's error.

    Raises:
        ConfigError: a value cannot be read.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{source}: a value cannot be read: {error}; is it a shell variable without a value?"
        ) from error


@dataclass(frozen=True)
class Import:
    """A configuration of ours made of foreign settings, and the account of them."""

    command: str
    """What runs the configuration: `rlhf train`, `rlhf offline dpo`, `rlhf generate`, `rlhf score`."""
    source: str
    """What was imported."""
    settings: Mapping[str, Any]
    findings: tuple[Finding, ...]
    remarks: tuple[str, ...]
    unwritten: tuple[str, ...] = ()
    """See `Draft.unwritten`."""

    @property
    def left_out(self) -> tuple[Finding, ...]:
        """What has no counterpart."""
        return tuple(finding for finding in self.findings if finding.outcome in LEFT_OUT)

    @property
    def complete(self) -> bool:
        """Whether nothing was left out."""
        return not self.left_out and not self.unwritten


def finish(draft: Draft, *, command: str, source: str) -> Import:
    """The import that a draft holds, once our own reader has taken the settings.

    Raises:
        ConfigError: our reader refuses them; the message has its reason.
    """
    from rlhf_algos import OfflineConfig, from_mapping

    from rlhf_launch.config.generate import GenerateConfig
    from rlhf_launch.config.run import OnlineConfig

    kinds: Mapping[str, type[Any]] = {"train": OnlineConfig, "generate": GenerateConfig, "score": GenerateConfig}
    kind = kinds.get(command.split()[1], OfflineConfig)
    from_mapping(kind, draft.settings, source=f"{source}, imported")
    if lost := [name for name in draft.given if name not in draft.findings]:
        raise ConfigError(f"{source}: no account of {', '.join(draft.written[name] for name in lost)}")
    findings = tuple(draft.findings[name] for name in draft.given)
    return Import(
        command, source, _in_order(draft.settings), findings, tuple(draft.remarks), tuple(draft.unwritten)
    )


_ORDER = (
    *("model", "data", "lengths", "reward", "algorithm", "rollout", "train", "evaluation", "checkpoint"),
    *("placement", "weight_sync", "output", "seed", "tensorboard"),
)


def _in_order(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a person would write them: sections in the order of the reference, a name first."""
    ordered = {key: settings[key] for key in sorted(settings, key=_ORDER.index)}
    if isinstance(algorithm := ordered.get("algorithm"), dict) and "name" in algorithm:
        ordered["algorithm"] = {"name": algorithm["name"]} | algorithm
    return ordered
