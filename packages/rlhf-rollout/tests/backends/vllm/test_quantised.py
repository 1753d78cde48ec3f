"""Weights that vLLM quantises while loading are quantised again by a sync."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from rlhf_core import GenerationRequest, RolloutConfig, SamplingConfig
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, sync
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack


def test_a_sync_reaches_int8_weights(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, tokenizer=False)
    options = {"quantization": "int8_per_channel_weight_only"}
    config = RolloutConfig(model=path, dtype="bfloat16", max_model_len=256, max_num_seqs=8, options=options)
    backend, trainer = VLLMBackend(config), Trainer(path)
    sampling = SamplingConfig(max_tokens=32)
    request = GenerationRequest(
        request_id="r", prompt_token_ids=tuple(range(40, 70)), sampling=sampling, n=4, seed=0
    )

    def gap() -> float:
        """Mean distance to the weights at full precision."""
        samples = asyncio.run(backend.generate(request)).samples
        gaps = [(trainer.log_probs(request, s) - torch.tensor(s.log_probs)).abs() for s in samples]
        return float(torch.cat(gaps).mean())

    before = gap()
    assert 1e-4 < before < 0.05, "either not quantised, or far off"
    trainer.perturb()
    assert gap() > 5 * before
    asyncio.run(sync(backend, trainer))
    assert 1e-4 < gap() < 2 * before
    backend.close()
