"""Engine checkpoints (every rank writes its shard) and the export to a Transformers directory (rank 0 writes)."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rlhf_core import ConfigError
from torch import Tensor

from rlhf_train.process_group import TrainingRanks
from rlhf_train.zero_weights import ZeroWeights

TAG = "zero"
STATE = "engine.json"


@dataclass(kw_only=True)
class Progress:
    """Counters of the engine that outlive it."""

    steps_taken: int = 0
    """Optimizer steps; skipped ones do not count. Drives the learning-rate schedule."""
    skipped_in_a_row: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """What `engine.json` holds."""

    world_size: int
    stage: int
    trained: bool
    progress: dict[str, int] = field(default_factory=dict)


def save_checkpoint(
    engine: Any, path: Path, *, ranks: TrainingRanks, stage: int, progress: Progress, random: list[Tensor]
) -> None:
    """Write shards, optimizer state, random state and counters. `engine` is None for a frozen role: its weights
    are those of the model it was loaded from.
    """
    path = Path(path)
    if engine is not None:
        engine.save_checkpoint(str(path), tag=TAG, save_latest=False)
    torch.save(random, _random_file(path, ranks))
    if ranks.info.rank == 0:
        written = _Written(
            world_size=ranks.size, stage=stage, trained=engine is not None, progress=asdict(progress)
        )
        (path / STATE).write_text(json.dumps(asdict(written)))
    ranks.barrier()


def load_checkpoint(engine: Any, path: Path, *, ranks: TrainingRanks, stage: int) -> tuple[Progress, list[Tensor]]:
    """Inverse of `save_checkpoint`.

    Raises:
        ConfigError: nothing is there, or it was written by another number of ranks or another stage.
    """
    path = Path(path)
    if not (path / STATE).exists():
        raise ConfigError(f"no engine checkpoint in {str(path)!r}: {STATE} is missing")
    written = _Written(**json.loads((path / STATE).read_text()))
    here = _Written(world_size=ranks.size, stage=stage, trained=engine is not None, progress=written.progress)
    if written != here:
        raise ConfigError(
            f"the checkpoint in {str(path)!r} is of {_describe(written)}, this engine has {_describe(here)}; "
            "resume with the same settings, or start from an export"
        )
    if engine is not None:
        found, _ = engine.load_checkpoint(str(path), tag=TAG, load_lr_scheduler_states=False)
        if found is None:
            raise ConfigError(f"the checkpoint in {str(path)!r} has no complete set of shards in {TAG!r}")
    random = torch.load(_random_file(path, ranks), map_location="cpu", weights_only=True)
    ranks.barrier()
    return Progress(**written.progress), random


def _describe(written: _Written) -> str:
    kind = "a trained" if written.trained else "a frozen"
    return f"{kind} model, {written.world_size} ranks, ZeRO stage {written.stage}"


def _random_file(path: Path, ranks: TrainingRanks) -> Path:
    return path / f"random-{ranks.info.rank}.pt"


def export_model(model: Any, path: Path, *, ranks: TrainingRanks, shard_bytes: int) -> None:
    """Write config and safetensors in the training dtype. One file's worth of weights is gathered at a time, and
    only rank 0 keeps it.
    """
    from safetensors.torch import save_file

    path = Path(path)
    weights = ZeroWeights(model)
    manifest = weights.manifest(0, bucket_bytes=shard_bytes)
    buckets = manifest.buckets()
    index: dict[str, str] = {}
    for number, bucket in enumerate(buckets, start=1):
        tensors = weights.gather(bucket)
        if ranks.info.rank != 0:
            continue
        name = "model.safetensors" if len(buckets) == 1 else f"model-{number:05}-of-{len(buckets):05}.safetensors"
        # Copies: ZeRO's parameters are views into flat buffers, which safetensors would take for tied weights.
        content = {key: tensor.cpu().clone().contiguous() for key, tensor in tensors}
        save_file(content, path / name, metadata={"format": "pt"})
        index |= dict.fromkeys(content, name)
    if ranks.info.rank == 0:
        if len(buckets) > 1:
            whole = {"metadata": {"total_size": manifest.total_bytes}, "weight_map": index}
            (path / "model.safetensors.index.json").write_text(json.dumps(whole, indent=2))
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(path)
        if model.can_generate():
            model.generation_config.save_pretrained(path)
    ranks.barrier()
