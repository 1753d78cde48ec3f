"""What a run has written of itself, as far as a model card tells it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core import DataError

_RECORD = "run.json"
_PLOT = "plot.png"
_WITHOUT_EVALUATION = ("reward", "loss", "accuracy", "response_length", "kl", "entropy")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One data set of a run."""

    path: str
    """As the settings have it."""
    hub: bool
    """On the hub, where only its name is known."""
    split: str
    sha256: str | None = None
    """Of the file that was trained on; None for a directory, and where that content is not here any more."""
    fingerprint: str | None = None
    """What the run noted of the content: a SHA-256 over the SHA-256 of each file."""
    rows: int | None = None
    """None where the content is not here any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A number of a run at its beginning and at its end."""

    name: str
    first: float
    first_step: int
    last: float
    last_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """A run, as its directory describes it."""

    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    data: Sequence[DataFile]
    steps: int
    """Steps with metrics."""
    changes: Sequence[Change] = field(default=())
    """Evaluations; where there are none, the numbers of training."""
    evaluated: bool = False
    plot: Path | None = None
    resumed: int = 0
    """How often the run was resumed."""

    @property
    def online(self) -> bool:
        """A run of `rlhf train`; else one of `rlhf offline` or `rlhf-algos`."""
        return "rollout" in self.settings

    @property
    def command(self) -> str:
        """What repeats it, with its settings in config.yaml."""
        if self.online:
            return "rlhf train config.yaml"
        return f"rlhf offline {self.settings['algorithm']['name']} config.yaml"


def read_trained_run(folder: Path) -> TrainedRun:
    """Read a run's directory.

    Raises:
        DataError: its record is damaged.
    """
    from rlhf_algos import read_metrics

    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        settings, versions = record["settings"], record["versions"]
        sources, fingerprint = settings["data"]["train"], record["fingerprint"]
        data = [_data_file(source, fingerprint[f"data.train[{n}]"]) for n, source in enumerate(sources)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{str(folder / _RECORD)!r} is not the record of a run ({type(error).__name__}: {error}); restore it, "
            "or export a copy of the model outside of the run's directory, whose card then says nothing of the run"
        ) from error
    metrics = folder / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    evaluations = sorted({name for row in rows for name in row if name.startswith("eval/")})
    plot = folder / _PLOT
    return TrainedRun(
        settings=settings,
        versions=versions,
        data=data,
        steps=max((int(row["step"]) for row in rows), default=0),
        changes=_changes(rows, evaluations or _WITHOUT_EVALUATION),
        evaluated=bool(evaluations),
        plot=plot if plot.is_file() else None,
        resumed=len(record.get("resumed", ())),
    )


def _data_file(source: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> DataFile:
    from rlhf_algos import DataSource, data_fingerprint, read_rows

    if "hub" in fingerprint:
        return DataFile(path=source["path"], hub=True, split=source["split"])
    given = DataSource(**{name: value for name, value in source.items() if name in ("path", "split", "limit")})
    path, sha256, rows = Path(given.path), None, None
    if path.exists() and data_fingerprint(given) == fingerprint:
        rows = len(read_rows(given))
        if path.is_file():
            with path.open("rb") as content:
                sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    noted = fingerprint["sha256"]
    return DataFile(
        path=source["path"], hub=False, split=source["split"], sha256=sha256, fingerprint=noted, rows=rows
    )


def _changes(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Change]:
    found = []
    for name in names:
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]
        if points:
            (first_step, first), (last_step, last) = points[0], points[-1]
            found.append(Change(name=name, first=first, first_step=first_step, last=last, last_step=last_step))
    return found
