"""Checkpoints of a run: written under another name, renamed when complete; older ones are deleted after that."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_core import DataError

_STATE = "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpublished:
    """A checkpoint that is being filled."""

    step: int
    folder: Path
    """The directory that the engines fill."""
    state: Mapping[str, Any]
    """JSON-serialisable state of the loop."""

    def rated(self, score: float | None) -> Unpublished:
        """The same with the number by which the best checkpoint is found."""
        return replace(self, state={**self.state, "score": score})


class CheckpointStore:
    """The checkpoints of a run: directories like `step-000010/` in one folder.

    A checkpoint exists if its directory has its final name: it is filled under a temporary name, `state.json`
    last, and renamed. A crash at any moment leaves the previous checkpoints as they were. The newest `keep` stay,
    and the best one of those whose state has a number under `score`.
    """

    def __init__(self, folder: Path, *, keep: int = 2, best: Literal["max", "min"] = "max") -> None:
        self.folder = folder
        self._keep = max(1, keep)
        self._sign = 1 if best == "max" else -1

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-[0-9]*"))

    def begin(self, step: int, state: Mapping[str, Any]) -> Unpublished:
        """Begin a checkpoint after `step` completed steps; what an interrupted one left is removed."""
        for left in self.folder.glob(".unfinished-*"):
            shutil.rmtree(left)
        folder = self.folder / f".unfinished-step-{step:06d}"
        folder.mkdir(parents=True)
        return Unpublished(step=step, folder=folder, state=state)

    def publish(self, filled: Unpublished) -> Path:
        """Add the state, give it its name, then delete the oldest."""
        target = self._path(filled.step)
        with (filled.folder / _STATE).open("w", encoding="utf-8") as file:
            json.dump({"step": filled.step, **filled.state}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        replaced = self.folder / f".replaced-step-{filled.step:06d}"
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            target.rename(replaced)
        filled.folder.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
        best = self.best()
        for old in self.steps()[: -self._keep]:
            if old != best:
                shutil.rmtree(self._path(old))
        return target

    def write(self, step: int, state: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
        """Write a checkpoint whose engines' parts `fill(directory)` writes."""
        unpublished = self.begin(step, state)
        fill(unpublished.folder)
        return self.publish(unpublished)

    def best(self) -> int | None:
        """Step of the checkpoint with the best score, the latest of equal ones; None if none has a score."""
        scored = [(score * self._sign, step) for step in self.steps() if (score := self._score(step)) is not None]
        return max(scored)[1] if scored else None

    def best_path(self) -> Path | None:
        """The checkpoint with the best score; None if none has a score."""
        best = self.best()
        return None if best is None else self._path(best)

    def improves(self, score: float) -> bool:
        """Whether a score is better than that of every complete checkpoint."""
        best = self.best()
        known = None if best is None else self._score(best)
        return known is None or score * self._sign > known * self._sign

    def _score(self, step: int) -> float | None:
        score = self._state(step).get("score")
        return score if isinstance(score, int | float) and math.isfinite(score) else None

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _state(self, step: int) -> dict[str, Any]:
        return json.loads((self._path(step) / _STATE).read_text(encoding="utf-8"))

    def latest(self) -> tuple[Path, dict[str, Any]]:
        """The newest complete checkpoint and its state.

        Raises:
            DataError: there is none.
        """
        steps = self.steps()
        if not steps:
            raise DataError(
                f"nothing to resume: no complete checkpoint under {self.folder}. Start without --resume, or point "
                "output at the run to continue"
            )
        return self._path(steps[-1]), self._state(steps[-1])
