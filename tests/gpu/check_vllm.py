"""vLLM on CUDA under weight syncs: CUDA graphs, fp8, mixtures of experts, MLA; sleep and wake."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import tiny_model
from gpu_registry import gpu_check
from rlhf_core import GenerationRequest, RolloutConfig, SamplingConfig
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_experts, save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, sync

REQUEST = GenerationRequest(
    request_id="r",
    prompt_token_ids=tuple(range(40, 70)),
    sampling=SamplingConfig(max_tokens=32),
    n=4,
    seed=0,
)
MLA = {
    "vocab_size": 512,
    "hidden_size": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "v_head_dim": 128,
    "head_dim": 64,
}
"""The head sizes of DeepSeek's own models, the only ones that vLLM's kernels take."""


def saved(kind: str, folder: Path) -> str:
    """A tiny model of that kind."""
    if kind == "experts":
        return save_tiny_experts(folder, "qwen3_moe")
    if kind == "mla":
        tiny_model("deepseek_v3", **MLA).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        return str(folder)
    # vLLM's fp8 kernels take multiples of 16 only, which these are.
    return save_tiny_model(folder, hidden_size=256)


@contextmanager
def engine(path: str, **fields: Any) -> Iterator[Any]:
    """A vLLM backend in bfloat16."""
    from rlhf_rollout import VLLMBackend

    options = {"gpu_memory_utilization": 0.4, **fields.pop("options", {})}
    config = RolloutConfig(
        model=path, device="cuda", dtype="bfloat16", max_model_len=256, max_num_seqs=16, options=options, **fields
    )
    backend = VLLMBackend(config)
    try:
        yield backend
    finally:
        backend.close()


def gap(backend: Any, trainer: Trainer) -> float:
    """Mean difference between the log-probs of samples and those of a float32 forward pass."""
    samples = asyncio.run(backend.generate(REQUEST)).samples
    gaps = [(trainer.log_probs(REQUEST, one) - torch.tensor(list(one.log_probs))).abs() for one in samples]
    return float(torch.cat(gaps).mean())


def reloads(path: str, what: str, measure: Any, **fields: Any) -> None:
    """After each of three syncs the engine is as near to the trainer as it was to the model that it loaded."""
    trainer, unchanged = Trainer(path), Trainer(path)
    with engine(path, **fields) as backend:
        gaps = [gap(backend, trainer)]
        for _ in range(3):
            trainer.perturb()
            asyncio.run(sync(backend, trainer, kind="shm"))
            gaps.append(gap(backend, trainer))
        stale = gap(backend, unchanged)
    measure("log-probs against float32", f"{what}, loaded, then after each of 3 syncs", _nats(gaps))
    measure("log-probs against float32", f"{what}, of the weights before the syncs", _nats([stale]))
    assert max(gaps[1:]) <= 3 * gaps[0] + 0.02
    assert stale > 2 * max(gaps), "the changed weights must show, or the check above proves nothing"


def _nats(gaps: list[float]) -> str:
    return ", ".join(f"{one:.2g}" for one in gaps) + " nats"


@gpu_check("vLLM: graphs across syncs", "CUDA graphs see the new weights: dense, experts, MLA", packages=["vllm"])
@pytest.mark.parametrize("kind", ["dense", "experts", "mla"])
def test_graphs_across_syncs(kind: str, tmp_path: Path, measure: Any) -> None:
    reloads(saved(kind, tmp_path), f"bf16, graphs, {kind}", measure)


@gpu_check("vLLM: fp8 across syncs", "weights rounded to fp8 on arrival: dense, experts", packages=["vllm"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_fp8_across_syncs(kind: str, tmp_path: Path, measure: Any) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 products need a GPU of compute capability 8.9 or above")
    reloads(saved(kind, tmp_path), f"fp8, graphs, {kind}", measure, options={"quantization": "fp8"})


@gpu_check("vLLM: sleep and wake", "sleeping gives the memory back; the same log-probs after", packages=["vllm"])
def test_sleep_and_wake(tmp_path: Path, measure: Any) -> None:
    path = saved("dense", tmp_path)
    rows = [list(range(40, 90)), list(range(100, 180))]
    with engine(path, shares_devices=True) as backend:
        before = asyncio.run(backend.score_tokens(rows))
        awake = torch.cuda.mem_get_info()[0]
        asyncio.run(backend.pause("keep"))
        asyncio.run(backend.sleep())
        asleep, total = torch.cuda.mem_get_info()
        asyncio.run(backend.wake())
        asyncio.run(backend.resume())
        after = asyncio.run(backend.score_tokens(rows))
    freed = asleep - awake
    measure(
        "vLLM sleep", "of 0.4 of the memory, given back", f"{freed / 2**30:.1f} of {0.4 * total / 2**30:.1f} GiB"
    )
    assert freed > 0.8 * 0.4 * total - 2 * 2**30  # but for the context, graphs and kernels' own memory
    assert before == after
