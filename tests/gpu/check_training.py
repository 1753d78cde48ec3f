"""Training engines on CUDA: offload and reload, 4-bit weights, micro-batches that are found by a trial."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import largest_trained, save_model
from gpu_registry import gpu_check
from rlhf_core import EngineConfig, LoraConfig, Loss, OptimizerConfig
from rlhf_core.testing.engine_ground import rows, supervised_loss
from rlhf_core.testing.tiny import save_tiny_model

LOSS = Loss(function=supervised_loss)


def engine_of(kind: str, config: EngineConfig) -> Any:
    """A training engine of one rank."""
    if kind == "torch":
        from rlhf_algos import TorchEngine

        return TorchEngine(config)
    from rlhf_train import DeepSpeedEngine

    return DeepSpeedEngine(config)


ENGINES = ["torch", "deepspeed"]


@gpu_check("offload and reload", "what stays, seconds, equal scores, a next step", packages=["deepspeed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_and_reload(stage: int, tmp_path: Path, measure: Any) -> None:
    size = "0.5B"
    path = save_model(size, tmp_path)
    config = EngineConfig(
        model=path,
        dtype="bfloat16",
        device="cuda",
        optimizer=OptimizerConfig(),
        gradient_checkpointing=True,
        # Stage 1 cannot add up gradients of 16 bits in float32.
        options={"stage": stage, "accumulate_dtype": "bfloat16" if stage == 1 else "float32"},
    )
    engine = engine_of("deepspeed", config)
    try:
        batch = rows(lengths=(256,) * 4)
        engine.step(batch, LOSS)
        before = engine.score(batch).log_probs
        held = torch.cuda.memory_allocated()
        seconds = [_timed(engine.offload)]
        left = torch.cuda.memory_allocated()
        seconds.append(_timed(engine.reload))
        after = engine.score(batch).log_probs
        report = engine.step(batch, LOSS)
    finally:
        engine.close()
    gib = f"{held / 2**30:.2f} to {left / 2**30:.2f} GiB"
    measure("offload, reload", f"{size}, ZeRO-{stage}", f"{gib}, {seconds[0]:.1f} s, {seconds[1]:.1f} s")
    assert torch.equal(before, after)
    assert math.isfinite(report.loss)
    assert left < 0.1 * held


@gpu_check(
    "offload: the next step", "a step after reload is the step of an engine that stayed", packages=["deepspeed"]
)
@pytest.mark.parametrize("kind", ENGINES)
def test_the_step_after_a_reload(kind: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    config = EngineConfig(model=path, dtype="bfloat16", device="cuda", optimizer=OptimizerConfig())
    moved, stayed = engine_of(kind, config), engine_of(kind, config)
    try:
        for seed in range(2):
            reports = [engine.step(rows(seed), LOSS) for engine in (moved, stayed)]
            moved.offload()
            moved.reload()
            assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-3)
            assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-2)
    finally:
        moved.close()
        stayed.close()


@gpu_check(
    "Liger's kernels in bf16",
    "with fused norms and MLPs, log-probs and gradients are as near to float32 as without",
    packages=["liger_kernel", "deepspeed"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_fused_kernels(stage: int, tmp_path: Path, measure: Any) -> None:
    path = save_tiny_model(tmp_path, hidden_size=256)
    found = {}
    for name, dtype, fused in (
        ("exact", "float32", False),
        ("plain", "bfloat16", False),
        ("fused", "bfloat16", True),
    ):
        options = {"stage": stage, "liger_kernels": fused}
        engine = engine_of(
            "deepspeed",
            EngineConfig(model=path, dtype=dtype, device="cuda", optimizer=OptimizerConfig(), options=options),
        )
        try:
            scores = engine.score(rows()).log_probs.float().cpu()
            found[name] = scores, engine.step(rows(), LOSS).grad_norm
        finally:
            engine.close()
    (exact, norm), *others = found.values()
    (plain_gap, plain_error), (gap, error) = (
        (float((scores - exact).abs().max()), abs(its / norm - 1)) for scores, its in others
    )
    measure(
        "Liger's kernels in bf16", f"ZeRO-{stage}", f"{gap:.2g} nats, plain {plain_gap:.2g}; gradients {error:.1%}"
    )
    assert gap <= 2 * plain_gap + 0.02
    assert error <= 2 * plain_error + 0.02


@gpu_check(
    "QLoRA",
    "adapters over 4-bit weights learn, and merged weights leave",
    packages=["bitsandbytes", "peft", "deepspeed"],
)
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("codes", ["nf4", "fp4"])
def test_qlora(kind: str, codes: Any, tmp_path: Path) -> None:
    config = EngineConfig(
        model=save_tiny_model(tmp_path / "model", hidden_size=256),
        dtype="bfloat16",
        device="cuda",
        optimizer=OptimizerConfig(learning_rate=1e-2),
        lora=LoraConfig(rank=8, quantize=codes),
        options={} if kind == "torch" else {"stage": 2},
    )
    engine = engine_of(kind, config)
    try:
        losses = [engine.step(rows(), LOSS).loss for _ in range(8)]
        engine.export(tmp_path / "merged")
        scored = engine.score(rows()).log_probs
    finally:
        engine.close()
    assert losses[-1] < losses[0] - 0.1
    plain = engine_of("torch", EngineConfig(model=str(tmp_path / "merged"), dtype="bfloat16", device="cuda"))
    try:
        assert float((plain.score(rows()).log_probs - scored).abs().mean()) < 0.1
    finally:
        plain.close()


@gpu_check("micro-batches: auto", "the tokens that a trial finds fit into the GPU", packages=["deepspeed"])
@pytest.mark.parametrize("kind", ENGINES)
def test_auto_micro_batches(kind: str, tmp_path: Path, measure: Any) -> None:
    path = save_model("0.5B", tmp_path)
    config = EngineConfig(
        model=path,
        dtype="bfloat16",
        device="cuda",
        optimizer=OptimizerConfig(),
        max_tokens_per_micro_batch="auto",
        longest_row=2048,
    )
    engine = engine_of(kind, config)
    try:
        batch = rows(lengths=(2048,) * 32)
        engine.score(batch)
        torch.cuda.reset_peak_memory_stats()
        report = engine.step(batch, LOSS)
        fitted = engine.fitted_tokens()
        peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    finally:
        engine.close()
    setting = f"0.5B, {kind}, no checkpointing"
    found = f"{fitted['step'].tokens} tokens a step, {fitted['score'].tokens} a score"
    measure("max_tokens_per_micro_batch: auto", setting, f"{found}, peak {peak / total:.0%} of the GPU")
    assert math.isfinite(report.loss)
    assert fitted["step"].tokens >= 2048
    assert peak < total


@gpu_check("ZeRO-3 step", "tokens/s, MFU, seconds in the head, peak memory of a real size", packages=["deepspeed"])
def test_a_step_of_a_real_size(tmp_path: Path, measure: Any) -> None:
    size = largest_trained()
    config = EngineConfig(
        model=save_model(size, tmp_path),
        dtype="bfloat16",
        device="cuda",
        optimizer=OptimizerConfig(),
        gradient_checkpointing=True,
        max_tokens_per_micro_batch=8192,
        options={"stage": 3},
    )
    engine = engine_of("deepspeed", config)
    try:
        batch = replace(rows(lengths=(2048,) * 16), sample_ids=())
        engine.step(batch, LOSS)
        torch.cuda.reset_peak_memory_stats()
        seconds = min(_timed(lambda: engine.step(batch, LOSS)) for _ in range(2))
        peak = torch.cuda.max_memory_allocated()
        parameters = sum(getattr(one, "ds_numel", one.numel()) for one in engine.model.parameters())
    finally:
        engine.close()
    flops = 6 * parameters * batch.tokens
    setting = f"{size}, 16 rows of 2,048 tokens, micro-batches of 8,192"
    measure("ZeRO-3 step", setting, f"{seconds:.2f} s, {batch.tokens / seconds:.0f} tokens/s")
    measure("ZeRO-3 step", f"{setting}: TFLOP/s without recomputation", _share(flops / seconds))
    measure("ZeRO-3 step", f"{setting}: peak memory", f"{peak / 2**30:.1f} GiB")
    head = _head_seconds(size, tokens=batch.response_tokens)
    measure("ZeRO-3 step", f"{setting}: head alone", f"{head:.2f} s, {head / seconds:.0%} of the step")


def _head_seconds(size: str, *, tokens: int) -> float:
    """Seconds of log-probs through a head of this size, both ways, for so many tokens."""
    from gpu_models import qwen_config
    from rlhf_core import chunked_log_probs

    config = qwen_config(size)
    torch.manual_seed(0)
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.randint(0, config.vocab_size, (tokens,), device="cuda")

    def once() -> None:
        found, _ = chunked_log_probs(hidden, head, targets)
        found.sum().backward()

    once()
    return min(_timed(once) for _ in range(2))


def _share(flops: float) -> str:
    """TFLOP/s, and their share of what the device table of `rlhf plan` says of this GPU."""
    from rlhf_launch.planning.devices import device_here

    device = device_here()
    share = "" if device is None else f", MFU {flops / device.flops:.0%} of {device.flops / 1e12:.0f}"
    return f"{flops / 1e12:.0f} TFLOP/s{share}"


def _timed(run: Any) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started
