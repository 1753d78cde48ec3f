"""Engine checkpoints: every rank writes its shard."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rlhf_core import (
    CheckpointError,
    FittedTokens,
    RLHFError,
    TokenPass,
    damage_error,
    find_damage,
    fitted_as_values,
    fitted_from_values,
)
from torch import Tensor

from rlhf_train.checkpoint.background import PendingFiles, SaveThread
from rlhf_train.checkpoint.resize import UNIVERSAL, load_resized
from rlhf_train.parallel.ranks import TrainingRanks
from rlhf_train.weights.average import AverageWeights, release_gathered

TAG = "zero"
STATE = "engine.json"


@dataclass(kw_only=True)
class Progress:
    """Counters of an engine that its checkpoints keep."""

    steps_taken: int = 0
    """Optimizer steps; skipped ones do not count. Drives the learning-rate schedule."""
    skipped_in_a_row: int = 0
    steps_frozen: int = 0
    """Calls of `step` that changed nothing because of `freeze_steps`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """What `engine.json` holds."""

    world_size: int
    stage: int
    trained: bool
    progress: dict[str, int] = field(default_factory=dict)
    fitted_tokens: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(kw_only=True)
class EngineState:
    """What a checkpoint holds of an engine besides DeepSpeed's own state."""

    progress: Progress
    random: list[Tensor]
    """Random streams of this rank."""
    average: AverageWeights | None = None
    fitted_tokens: dict[TokenPass, FittedTokens] = field(default_factory=dict)
    """Sizes of micro-batches that trials have found."""


def save_checkpoint(engine: Any, path: Path, state: EngineState, *, ranks: TrainingRanks, stage: int) -> None:
    """Write shards, optimizer state, average, random state and counters. `engine` is None for a frozen role: its
    weights are those of the model it was loaded from.
    """
    path = Path(path)
    _save(engine, path, state, _writer(engine), ranks=ranks)
    _complete(engine, path, state, ranks=ranks, stage=stage)


def save_in_background(
    engine: Any, path: Path, state: EngineState, *, ranks: TrainingRanks, stage: int
) -> SaveThread:
    """Like `save_checkpoint`, but the files are written by a thread, from a copy made before this returns."""
    path = Path(path)
    files = PendingFiles(_writer(engine))
    _save(engine, path, state, files, ranks=ranks)
    then = replace(state, progress=replace(state.progress))

    def finish(error: str | None) -> None:
        errors = [one for one in ranks.gather(error) if one]
        if errors:
            raise RLHFError(f"the checkpoint in {str(path)!r} was not written: {errors[0]}")
        _complete(engine, path, then, ranks=ranks, stage=stage)

    return SaveThread(path, files.write, finish)


def _save(engine: Any, path: Path, state: EngineState, writer: Any, *, ranks: TrainingRanks) -> None:
    if ranks.info.rank == 0:
        # What an earlier save left here is not to be mistaken for parts of this one.
        (path / STATE).unlink(missing_ok=True)
        shutil.rmtree(path / UNIVERSAL, ignore_errors=True)
    if engine is not None:
        own, engine.checkpoint_engine = engine.checkpoint_engine, writer
        try:
            engine.save_checkpoint(str(path), tag=TAG, save_latest=False)
        finally:
            engine.checkpoint_engine = own
    writer.save(list(state.random), str(_random_file(path, ranks.info.rank)))
    if state.average is not None:
        writer.save(state.average.state(), str(_average_file(path, ranks.info.rank)))


def _complete(engine: Any, path: Path, state: EngineState, *, ranks: TrainingRanks, stage: int) -> None:
    """Write `engine.json`, which says that the checkpoint is complete, once all ranks have written their files."""
    ranks.barrier()
    if ranks.info.rank == 0:
        written = _Written(
            world_size=ranks.size,
            stage=stage,
            trained=engine is not None,
            progress=asdict(state.progress),
            fitted_tokens=fitted_as_values(state.fitted_tokens),
        )
        (path / STATE).write_text(json.dumps(asdict(written)))
    ranks.barrier()


def _writer(engine: Any) -> Any:
    return _TorchWriter() if engine is None else engine.checkpoint_engine


class _TorchWriter:
    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)


def load_checkpoint(engine: Any, path: Path, state: EngineState, *, ranks: TrainingRanks, stage: int) -> None:
    """Inverse of `save_checkpoint`; fills `state`.

    Another number of ranks may load it than wrote it: weights, optimizer and average are dealt anew. Random streams
    of ranks that did not exist stay as they are, so dropout then differs from the run that was saved.

    Raises:
        CheckpointError: nothing is there, a file is missing or damaged (all ranks raise the same), or it was
            written at another stage or for another kind of role.
    """
    path = Path(path)
    written = _read_state(path)
    here = replace(written, stage=stage, trained=engine is not None)
    if written != here:
        raise CheckpointError(
            f"the checkpoint in {str(path)!r} is of {_describe(written)}, this engine is of {_describe(here)}; "
            "resume with the same settings, or start from an export"
        )
    _check_files(path, written, state, ranks)
    if engine is not None:
        release_gathered(engine.optimizer)
    if engine is not None and stage > 0 and written.world_size != ranks.size:
        load_resized(engine, path, TAG, ranks=ranks)
    elif engine is not None:
        found, _ = engine.load_checkpoint(str(path), tag=TAG, load_lr_scheduler_states=False)
        if found is None:
            raise CheckpointError(f"the checkpoint in {str(path)!r} has no complete set of shards in {TAG!r}")
    if ranks.info.rank < written.world_size:
        state.random = _read(_random_file(path, ranks.info.rank))
    if state.average is not None:
        _load_average(state.average, path, written.world_size)
    state.progress = Progress(**written.progress)
    state.fitted_tokens = fitted_from_values(written.fitted_tokens)
    ranks.barrier()


def _read_state(path: Path) -> _Written:
    if not (path / STATE).exists():
        raise CheckpointError(f"no engine checkpoint in {str(path)!r}: {STATE} is missing")
    try:
        return _Written(**json.loads((path / STATE).read_text()))
    except (ValueError, TypeError) as error:
        raise damage_error(f"the checkpoint in {str(path)!r}", path / STATE, f"is damaged ({error})") from error


def _check_files(path: Path, written: _Written, state: EngineState, ranks: TrainingRanks) -> None:
    """Look at all files before anything is loaded, a share on each rank: one that failed alone would leave the
    others waiting for it in a collective.
    """
    files = [_random_file(path, rank) for rank in range(written.world_size)]
    if state.average is not None and _average_file(path, 0).exists():
        files += [_average_file(path, rank) for rank in range(written.world_size)]
    files += sorted((path / TAG).glob("*.pt"))
    found = ranks.gather(find_damage(files[ranks.info.rank :: ranks.size]))
    if damage := [one for one in found if one is not None]:
        raise damage_error(f"the checkpoint in {str(path)!r}", *damage[0])  # type: ignore[misc]


def _load_average(average: AverageWeights, path: Path, world_size: int) -> None:
    if not _average_file(path, 0).exists():
        raise CheckpointError(
            f"the checkpoint in {str(path)!r} has no average of the weights; resume without average_decay, or from "
            "a checkpoint of a run that had it"
        )
    average.load([_read(_average_file(path, rank)) for rank in range(world_size)])


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _describe(written: _Written) -> str:
    kind = "a trained" if written.trained else "a frozen"
    return f"{kind} model at ZeRO stage {written.stage}"


def _random_file(path: Path, rank: int) -> Path:
    return path / f"random-{rank}.pt"


def _average_file(path: Path, rank: int) -> Path:
    return path / f"average-{rank}.pt"
