"""A chain of runs: what is done is skipped, what was broken off goes on, each stage has the models before it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rlhf_algos import (
    CheckpointStore,
    DirectoryLock,
    OfflineConfig,
    ProgressBar,
    Start,
    differences,
    load_config,
    load_data,
    read_metrics,
    to_plain,
)
from rlhf_core import ConfigError, DataError, StopRequest

from rlhf_launch.chain.config import ChainConfig, StageConfig
from rlhf_launch.offline.run import train_offline
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.online.run import train

STAGE = "stage.json"
"""In a stage's directory, written when all else is there: the stage is done."""
CHAIN = "chain.json"
"""In the chain's directory, written when all stages are done."""
_LENGTH = ("train.steps", "train.epochs")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """What a stage has left."""

    name: str
    model: Path
    """A Transformers directory."""
    best: Path | None
    """The best model by a held-out metric, if one was looked for and found."""
    metrics: Mapping[str, float]
    """The newest value of every metric."""
    seconds: float
    """That it took; of a stage that was resumed, since then."""
    run_id: str
    """Of the run in its directory."""
    inputs: Mapping[str, str]
    """The runs of the stages whose models it used, by stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainResult:
    """What a chain has left."""

    folder: Path
    stages: Mapping[str, StageResult]
    """By name, in their order."""
    skipped: tuple[str, ...]
    """Those that were done before."""

    @property
    def model(self) -> Path:
        """The last stage's model."""
        return list(self.stages.values())[-1].model


def read_chain(path: Path, overrides: Sequence[str] = ()) -> ChainConfig:
    """The chain in a YAML file, with `dotted.key=value` on top.

    Raises:
        ConfigError: an unknown key or a value of the wrong type, of the chain or of one of its stages.
    """
    return load_config(ChainConfig, path, overrides)


def run_chain(
    config: ChainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    stop: StopRequest | None = None,
) -> ChainResult:
    """Run the stages of a chain one after the other, each as its own command would.

    All stages are checked before the first one starts: settings, data and rewards, with the models that the chain
    begins with in place of those that are to come.

    Args:
        config: the chain.
        resume: skip the stages that are done, and continue the one that was broken off.
        overwrite: move the chain in the output directory aside, and begin anew.
        console: where progress is shown; standard output if not given.
        stop: by which another thread may ask the stage that runs to end in good order.

    Raises:
        RunStopped: a stage was asked to end, and did so with a checkpoint; `resume` continues it.
        UserError: the input is at fault: a stage's settings, data or models, or what the directory holds.
        RLHFError: a stage failed while running.
    """
    start = Start(resume=resume, overwrite=overwrite)
    console, stop = console or Console(highlight=False), stop or StopRequest()
    config = replace(config, output=Path(config.output).absolute())
    _check_folder(config, start)
    done = _done(config) if resume else {}
    _check_stages(config, done)
    if overwrite and config.output.exists():
        aside = _moved_aside(config.output)
        console.print(f"the earlier chain is now in {str(aside)!r}", soft_wrap=True)
    skipped: list[str] = []
    found: dict[str, StageResult] = {}
    with DirectoryLock(config.output / "lock", say=lambda line: console.print(line, soft_wrap=True)):
        for place, name in enumerate(config.stages, start=1):
            stop.check()
            stage = _stage(config, name, found)
            title = f"stage {place} of {len(config.stages)}: {name}"
            if name in done:
                _check_done(config, name, stage, done[name], found)
                console.print(f"[bold]{title}[/] is done: {done[name]['model']}", soft_wrap=True)
                found[name] = _result(done[name])
                skipped.append(name)
                continue
            console.print(f"[bold]{title}[/]")
            found[name] = _run(config, name, stage, found, start, console, stop)
        _write(config.output / CHAIN, {"stages": {name: _plain(one) for name, one in found.items()}})
    return ChainResult(folder=config.output, stages=found, skipped=tuple(skipped))


def _check_folder(config: ChainConfig, start: Start) -> None:
    there = [name for name in config.stages if config.folder(name).exists() and any(config.folder(name).iterdir())]
    if there and not (start.resume or start.overwrite):
        raise ConfigError(
            f"{str(config.output)!r} holds the stage(s) {', '.join(there)} of an earlier chain; write --resume to "
            "continue it, --overwrite to move it aside and begin anew, or another output"
        )
    if start.resume and not there:
        raise DataError(f"nothing to resume: {str(config.output)!r} holds no chain. Start without --resume")


def _done(config: ChainConfig) -> dict[str, dict[str, Any]]:
    """The records of the stages that are done."""
    found: dict[str, dict[str, Any]] = {}
    for name in config.stages:
        file = config.folder(name) / STAGE
        if file.exists():
            found[name] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _check_stages(config: ChainConfig, done: Mapping[str, Any]) -> None:
    """Check what can be checked of the stages that are to run.

    Raises:
        UserError: with the stage in a note.
    """
    for name, stage in config.parsed().items():
        if name in done:
            continue
        try:
            if isinstance(stage, OfflineConfig):
                load_data(stage)
            else:
                check_inputs(stage).reward.close()
        except Exception as error:
            error.add_note(f"in stages.{name} of the chain")
            raise


def _stage(config: ChainConfig, name: str, found: Mapping[str, StageResult]) -> StageConfig:
    """A stage's configuration with the models of those before it."""
    models = {other: one.model for other, one in found.items()}
    best = {other: one.best for other, one in found.items() if one.best is not None}
    return config.stage(name, models, best)


def _check_done(
    config: ChainConfig, name: str, stage: StageConfig, record: Mapping[str, Any], found: Mapping[str, StageResult]
) -> None:
    """Refuse to skip a stage that would not be the one that is there.

    Raises:
        ConfigError: it has other settings now, or the models that it used are others.
    """
    again = f"restore them, or remove {str(config.folder(name))!r} to run the stage again"
    changed = [
        difference
        for difference in differences(_record(record["settings"]), _record(_settings(stage)))
        if difference.effect == "course" or difference.key in _LENGTH
    ]
    if changed:
        raise ConfigError(
            f"the stage {name!r} is done with other settings: {'; '.join(map(str, changed))}; {again}"
        )
    for other, run_id in record["inputs"].items():
        if other not in found or found[other].run_id != run_id:
            raise ConfigError(
                f"the stage {name!r} was done with another run of the stage {other!r} ({run_id}); remove "
                f"{str(config.folder(name))!r} to run it again"
            )
    if not Path(record["model"]).is_dir():
        raise DataError(f"the stage {name!r} is done, but its model is not in {record['model']!r}; {again}")


def _run(
    config: ChainConfig,
    name: str,
    stage: StageConfig,
    found: Mapping[str, StageResult],
    start: Start,
    console: Console,
    stop: StopRequest,
) -> StageResult:
    folder = config.folder(name)
    begun = start.resume and (folder / "run.json").exists()
    # A run without checkpoints that ended between its model and its record cannot go on: it has nothing left to do.
    ended = begun and (folder / "model").exists() and not CheckpointStore(folder / "checkpoints").steps()
    resume = begun and not ended
    begin = time.perf_counter()
    try:
        if isinstance(stage, OfflineConfig):
            with ProgressBar(quiet=False) as bar:
                trained = train_offline(
                    stage, resume=resume, overwrite=ended, on_event=bar.on_event, say=bar.say, stop=stop
                )
            model, best, metrics = trained.model, trained.best, trained.metrics
        else:
            learnt = train(stage, resume=resume, overwrite=ended, console=console, stop=stop)
            model, best, metrics = learnt.model, None, learnt.metrics
    except Exception as error:
        error.add_note(f"the chain is at the stage {name!r}; --resume continues with it")
        raise
    record = {
        "name": name,
        "model": str(model),
        "best": None if best is None else str(best),
        "metrics": dict(metrics) or _newest_metrics(folder),
        "seconds": time.perf_counter() - begin,
        "run_id": json.loads((folder / "run.json").read_text(encoding="utf-8"))["run_id"],
        "inputs": {other: found[other].run_id for other in config.needs(name)},
        "settings": _settings(stage),
    }
    _write(folder / STAGE, record)
    return _result(record)


def _newest_metrics(folder: Path) -> dict[str, float]:
    """Of a run that was resumed with no step left."""
    newest: dict[str, float] = {}
    with suppress(OSError):
        for row in read_metrics(folder / "metrics.jsonl"):
            newest |= row
    return newest


def _settings(stage: StageConfig) -> dict[str, Any]:
    return json.loads(json.dumps(to_plain(stage)))


def _record(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"settings": settings, "fingerprint": {}, "versions": {}}


def _result(record: Mapping[str, Any]) -> StageResult:
    return StageResult(
        name=record["name"],
        model=Path(record["model"]),
        best=None if record["best"] is None else Path(record["best"]),
        metrics=record["metrics"],
        seconds=record["seconds"],
        run_id=record["run_id"],
        inputs=record["inputs"],
    )


def _plain(result: StageResult) -> dict[str, Any]:
    best = None if result.best is None else str(result.best)
    return {"model": str(result.model), "best": best, "run_id": result.run_id, "metrics": dict(result.metrics)}


def _write(file: Path, record: Mapping[str, Any]) -> None:
    """Beside, then renamed: it is there whole or not at all."""
    beside = file.with_name(f"{file.name}.tmp")
    with beside.open("w", encoding="utf-8") as out:
        out.write(json.dumps(record, indent=1) + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(beside, file)


def _moved_aside(folder: Path) -> Path:
    target = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    count = 1
    while target.exists():
        count += 1
        target = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}-{count}")
    folder.rename(target)
    return target
