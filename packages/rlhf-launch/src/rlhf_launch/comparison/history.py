"""Metrics of whole runs by step, from their directories, `metrics.jsonl` files, or a stored history of several."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_algos import read_metrics
from rlhf_core import ConfigError, DataError

FORMAT = "rlhf-history/1"
METRICS = "metrics.jsonl"

COSTS = ("seconds/", "idle_seconds/", "tokens_per_second/", "memory/", "sync/probe_seconds")
"""What the names of metrics begin with that measure time and memory: they differ between equal runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The metrics of one run."""

    name: str
    """What it is called in reports."""
    metrics: Mapping[str, Mapping[int, float]]
    """By name, the values by step; NaN where the run wrote null, which is what JSON has for it."""

    @property
    def steps(self) -> list[int]:
        """All steps with a metric, ascending."""
        return sorted({step for values in self.metrics.values() for step in values})


def is_cost(metric: str) -> bool:
    """Whether a metric measures time or memory.

    >>> is_cost("seconds/step"), is_cost("reward"), is_cost("eval/held-out/seconds")
    (True, False, True)
    """
    return metric.startswith(COSTS) or metric.endswith("/seconds")


def read_histories(path: Path) -> list[History]:
    """The run in a directory or a `metrics.jsonl`, or all runs of a stored history.

    Raises:
        DataError: there is no such file, or it holds no metrics.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / METRICS).exists():
            raise DataError(f"{str(path)!r} holds no {METRICS}; give a run's output directory, or a stored history")
        return [_of_rows(str(path), read_metrics(path / METRICS))]
    if not path.exists():
        raise DataError(f"{str(path)!r} does not exist; give a run's directory, a {METRICS}, or a stored history")
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jsonl":
        return [_of_rows(str(path), read_metrics(path))]
    return _stored(path, text)


def store_histories(path: Path, histories: Sequence[History]) -> None:
    """Write histories as one file, which `read_histories` reads back; beside, then renamed.

    Raises:
        ConfigError: the file cannot be written.
    """
    runs = [
        {
            "name": history.name,
            "metrics": {
                name: [[step, _json_number(value)] for step, value in sorted(values.items())]
                for name, values in sorted(history.metrics.items())
            },
        }
        for history in histories
    ]
    beside = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"format": FORMAT, "runs": runs}) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}") from error


def _of_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> History:
    """Several rows of one step (a step and its evaluation) go together."""
    metrics: dict[str, dict[int, float]] = {}
    for row in rows:
        if not isinstance(row, Mapping) or not isinstance(row.get("step"), int):
            raise DataError(f"{name!r}: a row has no whole number under 'step'; give the metrics.jsonl of a run")
        for metric, value in row.items():
            if metric != "step" and (value is None or isinstance(value, int | float)):
                metrics.setdefault(metric, {})[row["step"]] = math.nan if value is None else float(value)
    if not metrics:
        raise DataError(f"{name!r} holds no metrics; the run has not taken a step")
    return History(name=name, metrics=metrics)


def _stored(path: Path, text: str) -> list[History]:
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise DataError(
                f"{str(path)!r} has format {content['format']!r}, this version of rlhf-launch reads {FORMAT!r}; "
                "store it anew with --store"
            )
        return [
            History(
                name=run["name"],
                metrics={
                    name: {int(step): math.nan if value is None else float(value) for step, value in points}
                    for name, points in run["metrics"].items()
                },
            )
            for run in content["runs"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{str(path)!r} is no history ({type(error).__name__}: {error}); `rlhf compare --store FILE RUN...` "
            "writes one"
        ) from error


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
