"""The configuration of a chain: what `rlhf chain CONFIG` reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_algos import OfflineConfig, from_mapping
from rlhf_core import ConfigError, did_you_mean

from rlhf_launch.config.run import OnlineConfig

Command = Literal["offline", "train"]
"""What a stage runs: `offline` (SFT, reward models, DPO, ...: `rlhf offline`) or `train` (`rlhf train`)."""
StageConfig = OfflineConfig | OnlineConfig

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_REFERENCE = re.compile(r"stage\.([A-Za-z0-9_-]+)(?:\.(best))?")
_OWN = ("command",)
_GIVEN = ("output",)
"""Keys that a stage gets from the chain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainConfig:
    """Runs one after the other, each with a directory of its own below `output`."""

    stages: Mapping[str, Any]
    """Name: {command: offline | train, and the keys of that command's own file}, in the order in which they run.
    Where a stage needs the model of an earlier one it says `stage.NAME`, or `stage.NAME.best` for the best one by
    the held-out metric of an offline stage."""
    output: Path = Path("runs/chain")
    """Gets a directory for each stage."""
    seed: int = 0
    """Seed of every stage that names none."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("stages is empty; write e.g. stages: {sft: {command: offline, algorithm: sft, ...}}")
        for name in self.stages:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"stages: {name!r} is no name for a stage; take small letters and digits")
            self._check(name)
        self.parsed()

    def _check(self, name: str) -> None:
        settings, key = self.stages[name], f"stages.{name}"
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{key} must hold the settings of a run, found {type(settings).__name__}")
        if settings.get("command") not in ("offline", "train"):
            raise ConfigError(
                f"{key}.command says what the stage runs, found {settings.get('command')!r}; write offline (sft, "
                "rm, dpo, ...) or train (ppo, grpo, ...)"
            )
        for given in _GIVEN:
            if given in settings:
                raise ConfigError(f"{key}.{given} is given by the chain ({self.folder(name)}); leave it out")
        earlier = list(self.stages)[: list(self.stages).index(name)]
        for where, (other, best) in references(settings, key):
            if other not in earlier:
                there = f"earlier ones are {', '.join(earlier)}" if earlier else "it is the first one"
                raise ConfigError(
                    f"{where}=stage.{other}: {did_you_mean(other, earlier)}a stage can name the model of an "
                    f"earlier one; {there} (a file of this name: ./stage.{other})"
                )
            if best and self.stages[other]["command"] != "offline":
                raise ConfigError(
                    f"{where}=stage.{other}.best: only offline stages leave a best model; leave .best out"
                )

    def folder(self, name: str) -> Path:
        """The directory of a stage."""
        return self.output / name

    def needs(self, name: str) -> tuple[str, ...]:
        """The stages whose models a stage names."""
        return tuple(dict.fromkeys(other for _, (other, _) in references(self.stages[name], "")))

    def stage(self, name: str, models: Mapping[str, Path | str], best: Mapping[str, Path | str]) -> StageConfig:
        """The configuration of a stage.

        Args:
            name: of the stage.
            models: the models that earlier stages left.
            best: the best ones, of stages that looked for one.

        Raises:
            ConfigError: a key or a value of the stage's settings; the message has the stage.
        """
        settings = {key: value for key, value in self.stages[name].items() if key not in _OWN}
        found = {"seed": self.seed, **_with_models(settings, models, best), "output": str(self.folder(name))}
        kind = OfflineConfig if self.stages[name]["command"] == "offline" else OnlineConfig
        return from_mapping(kind, found, source="chain", prefix=f"stages.{name}.")

    def parsed(self) -> dict[str, StageConfig]:
        """All stages, with the models that the chain begins with in place of those that are to come: what can be
        checked before the first stage runs is checked with these."""
        roots: dict[str, str] = {}
        found: dict[str, StageConfig] = {}
        for name in self.stages:
            found[name] = self.stage(name, roots, roots)
            roots[name] = found[name].model.path
        return found


def references(settings: Any, key: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Every `stage.NAME` among settings: (dotted key, (NAME, whether the best model is meant))."""
    if isinstance(settings, Mapping):
        for inner, value in settings.items():
            yield from references(value, f"{key}.{inner}")
    elif isinstance(settings, list | tuple):
        for place, value in enumerate(settings):
            yield from references(value, f"{key}[{place}]")
    elif isinstance(settings, str) and (match := _REFERENCE.fullmatch(settings)):
        yield key, (match[1], match[2] is not None)


def _with_models(settings: Any, models: Mapping[str, Path | str], best: Mapping[str, Path | str]) -> Any:
    if isinstance(settings, Mapping):
        return {name: _with_models(value, models, best) for name, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [_with_models(value, models, best) for value in settings]
    if isinstance(settings, str) and (match := _REFERENCE.fullmatch(settings)):
        name, wants_best = match[1], match[2] is not None
        if wants_best and name not in best:
            raise ConfigError(
                f"stage.{name}.best: the stage {name!r} left no best model; give it data.hold_out or "
                "evaluation.data"
            )
        return str((best if wants_best else models)[name])
    return settings
