"""Mean and deviation of a trained reward model's scores, and where they are kept."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rlhf_core import Ranks, RewardScale, TrainEngine, measured_scale

from rlhf_algos.offline.config import OfflineConfig
from rlhf_algos.offline.run_data import OfflineData, global_batch, own_units


def scale_of_scores(engine: TrainEngine, data: OfflineData, config: OfflineConfig, ranks: Ranks) -> RewardScale:
    """Measured on all answers of the held-out examples, without any on those of the training; a collective.

    Raises:
        ConfigError: the scores do not differ.
    """
    examples, size = data.eval or data.train, config.evaluation.batch_size
    seen: list[torch.Tensor] = []
    for start in range(0, len(examples), size):
        batch = global_batch(examples[start : start + size], data, config, engine, ranks)
        mine = own_units(batch, ranks)
        scores = engine.score(batch.select_units(mine or [0]), ("scores",)).scores
        if mine and scores is not None:
            seen.append(scores.cpu())
    return measured_scale(torch.cat(seen) if seen else torch.empty(0), ranks)


def keep_scale(file: Path, scale: RewardScale) -> None:
    """Write a scale into a model's config.json. One that is there already was taken out of what was measured."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    before = RewardScale.of_config(settings) or RewardScale()
    kept = RewardScale(mean=before.mean + before.std * scale.mean, std=before.std * scale.std)
    file.write_text(json.dumps({**settings, **kept.as_config()}, indent=2) + "\n", encoding="utf-8")
