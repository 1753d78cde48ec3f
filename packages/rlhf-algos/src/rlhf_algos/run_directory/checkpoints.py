"""Checkpoints of a run: written under another name, renamed when complete; older ones are deleted after that."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_core import CheckpointError, DataError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_algos.run_directory.manifest import flush_folder, manifest_problem, write_manifest

_STATE = "state.json"
_TENSORS = "state.safetensors"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpublished:
    """A checkpoint that is being filled."""

    step: int
    folder: Path
    """The directory that the engines fill."""
    state: Mapping[str, Any]
    """JSON-serialisable state of the loop: small numbers and names."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """What of the loop's state is large."""

    def rated(self, score: float | None) -> Unpublished:
        """The same with the number by which the best checkpoint is found."""
        return replace(self, state={**self.state, "score": score})


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """What was given to `begin`, and `step`."""

    def tensors(self) -> dict[str, Tensor]:
        """The large part of the loop's state, read from the disk."""
        file = self.path / _TENSORS
        return load_file(file) if file.exists() else {}


class CheckpointStore:
    """The checkpoints of a run: directories like `step-000010/` in one folder.

    A checkpoint exists if its directory has its final name: it is filled under a temporary name, then `state.json`,
    `state.safetensors` and the list of all files are added, all of it is brought to the disk, and it is renamed.
    A crash at any moment leaves the previous checkpoints as they were. The newest `keep` stay, and the best one of
    those whose state has a number under `score`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        best: Literal["max", "min"] = "max",
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        """Keep checkpoints in `folder`; `say` is told which damaged ones are passed over."""
        self.folder = folder
        self._keep = max(1, keep)
        self._sign = 1 if best == "max" else -1
        self._say = say

    def steps(self) -> list[int]:
        """Steps of the published checkpoints, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-[0-9]*"))

    def begin(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> Unpublished:
        """Begin a checkpoint after `step` completed steps; what an interrupted one left is removed."""
        for left in self.folder.glob(".unfinished-*"):
            shutil.rmtree(left)
        folder = self.unfinished(step)
        folder.mkdir(parents=True)
        return Unpublished(step=step, folder=folder, state=state, tensors=tensors or {})

    def unfinished(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is filled."""
        return self.folder / f".unfinished-step-{step:06d}"

    def publish(self, filled: Unpublished) -> Path:
        """Add the state and the list of all files, give it its name, then delete the oldest.

        Those of later steps go too: they are of a course that this run did not take, or damaged.
        """
        target = self.path(filled.step)
        text = json.dumps({"step": filled.step, **filled.state}, indent=1)
        (filled.folder / _STATE).write_text(text + "\n", encoding="utf-8")
        if filled.tensors:
            save_file(dict(filled.tensors), filled.folder / _TENSORS)
        write_manifest(filled.folder)
        replaced = self.folder / f".replaced-step-{filled.step:06d}"
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            target.rename(replaced)
        filled.folder.rename(target)
        flush_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        stay = {*[step for step in self.steps() if step <= filled.step][-self._keep :], self.best()}
        for step in self.steps():
            if step not in stay or step > filled.step:
                shutil.rmtree(self.path(step))
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
        return None if best is None else self.path(best)

    def improves(self, score: float) -> bool:
        """Whether a score is better than that of every complete checkpoint."""
        best = self.best()
        known = None if best is None else self._score(best)
        return known is None or score * self._sign > known * self._sign

    def path(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is, or would be."""
        return self.folder / f"step-{step:06d}"

    def latest(self) -> Checkpoint:
        """The newest checkpoint that is whole; damaged ones are passed over, and named.

        Raises:
            DataError: there is none.
            CheckpointError: all are damaged.
        """
        steps, damaged = self.steps(), ""
        for step in reversed(steps):
            path = self.path(step)
            if (problem := manifest_problem(path)) is None:
                return self.at(step)
            damaged = f"the checkpoint {str(path)!r} is damaged: {problem}"
            self._say(f"{damaged}; the one before it is taken")
        if steps:
            raise CheckpointError(
                f"{damaged}; there is no other one. Restore it, or begin again with --overwrite or another output"
            )
        raise DataError(
            f"nothing to resume: no complete checkpoint under {self.folder}. Start without --resume, or point "
            "output at the run to continue"
        )

    def at(self, step: int) -> Checkpoint:
        """The checkpoint after `step` steps."""
        return Checkpoint(step=step, path=self.path(step), state=self._state(step))

    def _score(self, step: int) -> float | None:
        score = self._state(step).get("score")
        return score if isinstance(score, int | float) and math.isfinite(score) else None

    def _state(self, step: int) -> dict[str, Any]:
        try:
            return json.loads((self.path(step) / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # damaged: `latest` says so
            return {}
