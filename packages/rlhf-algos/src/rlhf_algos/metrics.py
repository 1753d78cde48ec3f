"""What a run writes down of each step: a JSON object per line in `metrics.jsonl`, and TensorBoard beside it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class StepFile:
    """A file with a JSON object per line, each with the `step` that it is of; a context manager.

    A row is in the file when `write` returns, so that it outlives the process. A run that is resumed takes some of
    its steps again: their rows are cut off when it opens the file.

    >>> with StepFile(Path("run/samples.jsonl")) as samples:      # doctest: +SKIP
    ...     samples.write(1, {"prompts": [0, 1]})
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """Open a file for a run.

        Args:
            path: the file; its directory is made if it is not there.
            resume_step: rows after this step are dropped and the rest kept; None starts a new file.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.tmp")
        with beside.open("w", encoding="utf-8") as kept:
            for line, row in _rows(path) if resume_step is not None and path.exists() else ():
                if row["step"] <= (resume_step or 0):
                    kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        os.replace(beside, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one row."""
        self._file.write(json.dumps({"step": step} | dict(values)) + "\n")
        self._file.flush()

    def flush_to_disk(self) -> None:
        """Bring the rows to the disk itself, past the system's buffers: they outlive a power failure."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def __enter__(self) -> StepFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsWriter:
    """Appends a row of metrics per step; a context manager.

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
        self._rows = StepFile(directory / "metrics.jsonl", resume_step=resume_step)
        self.path = self._rows.path
        self._board: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            purge = None if resume_step is None else resume_step + 1
            self._board = SummaryWriter(str(directory), purge_step=purge, write_to_disk=True)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one row. Numbers that are not finite are written as null, which is what JSON has for them."""
        self._rows.write(step, {name: _json_number(value) for name, value in values.items()})
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, float(value), step)
            self._board.flush()

    def flush_to_disk(self) -> None:
        """See StepFile."""
        self._rows.flush_to_disk()

    def close(self) -> None:
        """Close the files; may be called twice."""
        self._rows.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a `StepFile`, such as `metrics.jsonl`; a last line that was cut off by a crash is left out."""
    return [row for _, row in _rows(path)]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every whole line and its object, up to the first one that is torn."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                return
            if not line.endswith("\n"):
                return
            yield line, row


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
