"""Metrics of a run: one JSON object per step in `metrics.jsonl`, and TensorBoard beside it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class MetricsWriter:
    """Appends a row per step; a context manager. Every row is on disk when `write` returns.

    >>> with MetricsWriter(Path("run"), tensorboard=False) as metrics:      # doctest: +SKIP
    ...     metrics.write(1, {"loss": 0.69})
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None, tensorboard: bool = True) -> None:
        """Open `directory` for a run.

        Args:
            directory: created if needed; holds `metrics.jsonl` and TensorBoard's event files.
            resume_step: rows after this step are dropped and the rest kept; None starts a new file.
            tensorboard: also write event files.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        kept = "" if resume_step is None else _rows_up_to(self.path, resume_step)
        temporary = self.path.with_suffix(".jsonl.tmp")
        temporary.write_text(kept, encoding="utf-8")
        os.replace(temporary, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            purge = None if resume_step is None else resume_step + 1
            self._board = SummaryWriter(str(directory), purge_step=purge, write_to_disk=True)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one row. Numbers that are not finite are written as null, which is what JSON has for them."""
        row = {"step": step} | {name: _json_number(value) for name, value in values.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, float(value), step)
            self._board.flush()

    def close(self) -> None:
        """Close the files; may be called twice."""
        self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a `metrics.jsonl`; a last line that was cut off by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _rows_up_to(path: Path, step: int) -> str:
    rows = read_metrics(path) if path.exists() else []
    return "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
