"""Checkpoints for another number of ranks, through DeepSpeed's universal format: one file per parameter."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlhf_core import CheckpointError
from torch import Tensor

from rlhf_train.parallel.ranks import TrainingRanks

UNIVERSAL = "universal"


def load_resized(engine: Any, path: Path, tag: str, *, ranks: TrainingRanks) -> None:
    """Load the shards that another number of ranks wrote into `path / tag`.

    Rank 0 converts them once; the result stays beside them. Weights, optimizer moments and step counts arrive
    exactly.

    Raises:
        CheckpointError: the optimizer is Muon, or the conversion failed.
    """
    if "Muon" in type(engine.basic_optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint in {str(path)!r} was written by another number of ranks, and Muon's momentum cannot "
            "be dealt anew; resume with as many ranks, or start from an export"
        )
    convert(path, tag, ranks=ranks)
    # DeepSpeed gives every group the settings of the first one; ours differ in weight decay.
    settings = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    config = engine._config
    before, config.load_universal_checkpoint = config.load_universal_checkpoint, True
    try:
        found, _ = engine.load_checkpoint(str(path), tag=UNIVERSAL, load_lr_scheduler_states=False)
    finally:
        config.load_universal_checkpoint = before
    if found is None:
        raise CheckpointError(f"the universal checkpoint in {str(path / UNIVERSAL)!r} is not complete; delete it")
    for group, own in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(own)
    for state in engine.basic_optimizer.state.values():
        # Stage 3 shares one step counter among all; torch then counts it up once for each of them.
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()


def convert(path: Path, tag: str, *, ranks: TrainingRanks) -> None:
    """Write `path / "universal"` from the shards in `path / tag`, unless it is there."""
    failure = None
    if ranks.info.rank == 0 and not (path / UNIVERSAL).exists():
        try:
            _convert(path / tag, path / UNIVERSAL)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    (failure, *_) = ranks.gather(failure)
    if failure:
        raise CheckpointError(
            f"the checkpoint in {str(path)!r} cannot be converted for another number of ranks: {failure}"
        )


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    unfinished = target.with_name(f"{UNIVERSAL}.writing-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    arguments = SimpleNamespace(
        input_folder=str(source),
        output_folder=str(unfinished),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)
    for file in source.glob("*mp_rank_*_model_states.pt"):
        if not (unfinished / file.name).exists():
            shutil.copy(file, unfinished)
    unfinished.rename(target)
