"""Checkpoints of an offline run: its engine, and where it stands."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_core import CheckpointError, Ranks, TrainEngine

from rlhf_algos.run_directory.checkpoints import CheckpointStore
from rlhf_algos.run_directory.manifest import check_seen_here, files_below
from rlhf_algos.run_directory.replacing import begin_beside, put_in_place
from rlhf_algos.torch_engine.ranks import rank_of

ENGINE = "engine"


@dataclass(kw_only=True, slots=True)
class OfflineState:
    """Where a run stands, apart from the engine."""

    step: int = 0
    """Optimizer steps taken."""
    best: float | None = None
    """Best value of the chosen eval metric."""
    best_step: int = 0
    evaluations_without_gain: int = 0
    stopped_early: bool = False


def save_checkpoint(store: CheckpointStore, engine: TrainEngine, state: OfflineState, *, ranks: Ranks) -> None:
    """Write a checkpoint, all ranks together; it counts when the files of all are there."""
    owner, folder = rank_of(ranks) == 0, store.unfinished(state.step)
    filled = store.begin(state.step, asdict(state)) if owner else None
    if owner:
        (folder / ENGINE).mkdir()
    ranks.max(0)
    engine.save(folder / ENGINE)
    seen = ranks.gather((socket.gethostname(), files_below(folder)))
    if filled is not None:
        check_seen_here(folder, seen)  # type: ignore[arg-type]
        store.publish(filled)
    ranks.max(0)


def load_checkpoint(store: CheckpointStore, step: int, engine: TrainEngine) -> OfflineState:
    """Continue from the checkpoint after `step` steps.

    Raises:
        CheckpointError: it is of another version, or of another engine.
    """
    saved = store.at(step)
    try:
        state = OfflineState(**saved.state)
    except TypeError as error:
        raise CheckpointError(f"{str(saved.path)!r} is not a checkpoint of an offline run: {error}") from None
    engine.load(saved.path / ENGINE)
    return state


def replace_directory(final: Path, write: Callable[[Path], None], *, ranks: Ranks) -> None:
    """Let all ranks `write` into a new directory, then put it in the place of `final`."""
    beside = final.with_name(f"{final.name}.tmp")
    if rank_of(ranks) == 0:
        begin_beside(final)
    ranks.max(0)
    write(beside)
    ranks.max(0)
    if rank_of(ranks) == 0:
        put_in_place(beside, final)
    ranks.max(0)
