"""An engine's weights as a Transformers directory, and its adapters as a directory of peft."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from rlhf_core import ADAPTER_FOLDER, LoraConfig, adapter_parameters, write_adapter

from rlhf_train.model.load import gathered
from rlhf_train.parallel.ranks import TrainingRanks
from rlhf_train.weights.source import ZeroWeights


def export_adapters(model: Any, path: Path, config: LoraConfig, *, ranks: TrainingRanks, base: str) -> None:
    """Write the adapters of a model beside what `export_model` wrote, as peft's files."""
    folder = Path(path) / ADAPTER_FOLDER
    parameters = adapter_parameters(model)
    with torch.no_grad(), gathered(list(parameters.values())):
        if ranks.info.rank == 0:
            folder.mkdir(exist_ok=True)
            write_adapter(folder, parameters, config, base=base)
    ranks.barrier()


def export_model(model: Any, path: Path, *, ranks: TrainingRanks, shard_bytes: int) -> None:
    """Write config and safetensors in the training dtype. One file's worth of weights is gathered at a time, and
    only rank 0 keeps it.
    """
    from safetensors.torch import save_file

    path = Path(path)
    weights = ZeroWeights(model)
    manifest = weights.manifest(0, bucket_bytes=shard_bytes)
    buckets = manifest.buckets()
    files = sum(bucket.is_last_part for bucket in buckets)
    number = 0
    index: dict[str, str] = {}
    for bucket in buckets:
        content = {}
        # All ranks go through the bucket, as each gather is theirs together. Copies: ZeRO's parameters are views
        # into flat buffers, which safetensors would take for tied weights.
        for key, tensor in weights.gather(bucket):
            if ranks.info.rank == 0 and bucket.is_last_part:  # a larger tensor has a file of its own
                content[key] = tensor.cpu().clone().contiguous()
        if ranks.info.rank != 0 or not bucket.is_last_part:
            continue
        number += 1
        name = "model.safetensors" if files == 1 else f"model-{number:05}-of-{files:05}.safetensors"
        save_file(content, path / name, metadata={"format": "pt"})
        index |= dict.fromkeys(content, name)
    if ranks.info.rank == 0:
        if files > 1:
            whole = {"metadata": {"total_size": manifest.total_bytes}, "weight_map": index}
            (path / "model.safetensors.index.json").write_text(json.dumps(whole, indent=2))
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(path)
        if model.can_generate():
            model.generation_config.save_pretrained(path)
    ranks.barrier()
