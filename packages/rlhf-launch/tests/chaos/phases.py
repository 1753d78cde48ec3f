"""Runs a command and tells, in a small mapped file, which phase of the run it is in.

`python phases.py FILE rlhf train ...` is `rlhf train ...`, to the bit: a phase is a byte in memory that another
process maps, too. Whoever wants to kill the run there reads it.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = (
    *("start", "restore", "evaluation", "generation", "rewards", "scoring", "stepping", "syncing"),
    *("saving", "publishing", "export", "closing", "reference", "between"),
)
_SIZE = 64


@dataclass(frozen=True, slots=True)
class PhaseFile:
    """Byte 0 is the phase; byte 1 + p says how often phase p was entered, modulo 256."""

    memory: mmap.mmap

    @classmethod
    def open(cls, path: Path, *, new: bool = False) -> PhaseFile:
        """Map the file; a new one says `start`."""
        if new:
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), _SIZE))

    @property
    def now(self) -> str:
        """The phase."""
        return PHASES[self.memory[0]]

    def entered(self, phase: str) -> int:
        """How often the phase was entered."""
        return self.memory[1 + PHASES.index(phase)]

    def enter(self, phase: str) -> str:
        """Note the phase; returns the one before."""
        before, place = self.now, PHASES.index(phase)
        self.memory[1 + place] = (self.memory[1 + place] + 1) % 256
        self.memory[0] = place
        return before

    def back_to(self, phase: str) -> None:
        """Note that an inner phase is over."""
        self.memory[0] = PHASES.index(phase)

    def told(self, phase: str, function: Callable[..., Any], after: str | None = None) -> Callable[..., Any]:
        """The function as a phase; `after` is the phase behind it, if not the one before."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.back_to(after or before)

        return call


def tell_online(phases: PhaseFile) -> None:
    """Let the phases of `rlhf train` be told."""
    import rlhf_launch.online.loop as loop
    import rlhf_launch.online.run as run
    from rlhf_algos import CheckpointStore
    from rlhf_launch.online.state import RunState
    from rlhf_launch.online.trainer import Trainer
    from rlhf_launch.samples.producer import Producer
    from rlhf_launch.samples.reward import Rewarder
    from rlhf_launch.weight_sync.replacement import RolloutReplacement
    from rlhf_launch.workers.train_group import TrainGroup

    for owner, name, phase, after in (
        (run, "restore", "restore", "between"),
        (run, "evaluate", "evaluation", "between"),
        (loop, "evaluate", "evaluation", "between"),
        (Producer, "collect", "generation", "between"),
        (Rewarder, "decode", "rewards", None),
        (Trainer, "score", "scoring", None),
        (Trainer, "update", "stepping", "between"),
        (RolloutReplacement, "sync", "syncing", "between"),
        (RunState, "save", "saving", "between"),
        (CheckpointStore, "publish", "publishing", None),
        (TrainGroup, "export", "export", "closing"),
    ):
        setattr(owner, name, phases.told(phase, getattr(owner, name), after))


def tell_offline(phases: PhaseFile) -> None:
    """Let the phases of `rlhf-algos` and `rlhf offline` be told."""
    from rlhf_algos import CheckpointStore

    # Its phases are nobody's interface; who watches them reaches into the loop knowingly.
    loop = importlib.import_module("rlhf_algos.offline.loop")

    for owner, name, phase, after in (
        (loop, "add_reference", "reference", "start"),
        (loop, "load_checkpoint", "restore", "between"),
        (loop, "evaluate", "evaluation", "between"),
        (loop, "_train_step", "stepping", "between"),
        (loop, "save_checkpoint", "saving", "between"),
        (CheckpointStore, "publish", "publishing", None),
        (loop, "_export", "export", None),
    ):
        setattr(owner, name, phases.told(phase, getattr(owner, name), after))


def main() -> None:
    """Run the command behind the file's name."""
    phases = PhaseFile.open(Path(sys.argv[1]))
    command, sys.argv = sys.argv[2], sys.argv[2:]
    if command == "rlhf-algos":
        tell_offline(phases)
        home = "rlhf_algos.command"
    else:
        (tell_online if sys.argv[1] == "train" else tell_offline)(phases)
        home = "rlhf_launch.cli.main"
    importlib.import_module(home).main()


if __name__ == "__main__":
    main()
