"""Checkpoints of a run: written beside, renamed when complete; an older one goes only after that."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_core import DataError

_STATE = "state.json"


class CheckpointStore:
    """The directory `step-000010/` and its like under one folder.

    A checkpoint exists if its directory has its final name: it is filled under a temporary name, `state.json`
    last, and renamed. A crash at any moment leaves the previous checkpoints as they were.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self._keep = max(1, keep)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-[0-9]*"))

    def write(self, step: int, state: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
        """Let `fill(directory)` write the engines' parts, add `state`, publish, then delete the oldest.

        Args:
            step: completed steps.
            state: JSON-serialisable state of the loop.
            fill: writes into the directory it is given.
        """
        target = self.folder / f"step-{step:06d}"
        unfinished = self.folder / f".unfinished-step-{step:06d}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        fill(unfinished)
        with (unfinished / _STATE).open("w", encoding="utf-8") as file:
            json.dump({"step": step, **state}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        replaced = self.folder / f".replaced-step-{step:06d}"
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            target.rename(replaced)
        unfinished.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.folder / f"step-{old:06d}")
        return target

    def latest(self) -> tuple[Path, dict[str, Any]]:
        """The newest complete checkpoint and its state.

        Raises:
            DataError: there is none.
        """
        steps = self.steps()
        if not steps:
            raise DataError(
                f"nothing to resume: no complete checkpoint under {self.folder}. Start without --resume, or point "
                "output_dir at the run to continue"
            )
        path = self.folder / f"step-{steps[-1]:06d}"
        return path, json.loads((path / _STATE).read_text(encoding="utf-8"))
