"""bfloat16 on CUDA: packed rows by each kernel against padded ones, and the chunked head against full logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from family_models import tiny_model
from family_verdicts import rows
from gpu_registry import gpu_check
from rlhf_core import chunked_log_probs, log_probs_from_logits, model_outputs, try_model

WIDER = {"hidden_size": 128, "head_dim": 32}
"""FlexAttention's kernels take heads of 16 and more."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"hidden_size": 128},
    "qwen3": WIDER,
    "llama": WIDER,
    "mistral": WIDER,
    "gemma2": WIDER,
    "gemma3_text": WIDER,
    "gpt_oss": WIDER,
    "qwen3_moe": WIDER,
    "deepseek_v3": {},
}
KERNELS = ("varlen", "blocks", "sdpa")
CHOICE = "rlhf_core.model.attention.enable"
"""The module that takes the first kernel with the right numbers."""


def models(family: str) -> tuple[Any, Any]:
    """A bfloat16 model on the GPU, and the same weights in float32 on the CPU."""
    narrow = tiny_model(family, **FAMILIES[family]).to(torch.bfloat16)
    return copy.deepcopy(narrow).to("cuda"), narrow.float()


def numbers(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the rows, and the gradient of their sum with respect to all weights, as one vector."""
    model.zero_grad()
    device = model.get_input_embeddings().weight.device
    found = model_outputs(model, rows().to(device), ("log_probs",)).log_probs
    assert found is not None
    found.sum().backward()
    parts = [p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None]
    return found.detach().cpu(), torch.cat(parts)


def errors(found: Any, expected: Any) -> tuple[float, float]:
    """Largest difference of a log-prob; relative error of the gradient."""
    log_probs = float((found[0] - expected[0]).abs().max())
    return log_probs, float((found[1] - expected[1]).norm() / expected[1].norm())


@gpu_check("packing: kernels in bf16", "each kernel's packed rows are as near to float32 as padded rows are")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows(family: str, kernel: str, measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, exact = models(family)
    try_model(exact, "policy", packing=False)
    expected = numbers(exact)
    plain = copy.deepcopy(model)
    try_model(plain, "policy", packing=False)
    padded = errors(numbers(plain), expected)
    monkeypatch.setattr(f"{CHOICE}.kernels_for", lambda *_: (kernel,))
    trial = try_model(model, "policy")
    if not trial.packing:
        measure("packed rows in bf16", f"{family}, {kernel}", f"declined: {trial.declined}")
        assert kernel != "sdpa", trial.declined
        pytest.skip(trial.declined)
    packed = errors(numbers(model), expected)
    measure("packed rows in bf16", f"{family}, {kernel}", f"{packed[0]:.2g} nats (padded {padded[0]:.2g})")
    assert packed[0] <= 2 * padded[0] + 0.02
    assert packed[1] <= 2 * padded[1] + 0.02


@gpu_check("packing: choice in bf16", "which kernel each family gets; none runs padded")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_that_is_chosen(family: str, measure: Any) -> None:
    model, _ = models(family)
    trial = try_model(model, "policy")
    measure("kernel chosen in bf16", family, trial.declined or model.config._attn_implementation)
    assert trial.packing, trial.declined


@gpu_check("head: chunks in bf16", "log-probs and gradients of the chunked head are those of full logits")
@pytest.mark.parametrize("chunk", [None, 64, 4096])
def test_the_head(chunk: int | None, measure: Any) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(896, 151_936, bias=False, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(1024, 896, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.randint(0, 151_936, (1024,), device="cuda")
    found, _ = chunked_log_probs(hidden, head, targets, chunk=chunk)
    ours = torch.autograd.grad(found.sum(), (hidden, head.weight))
    # The same rounded factors in float32: the full logits that no 16-bit sum has touched.
    exact = (hidden.detach().float().requires_grad_(), head.weight.detach().float().requires_grad_())
    expected = log_probs_from_logits(torch.nn.functional.linear(*exact), targets)
    wanted = torch.autograd.grad(expected.sum(), exact)
    gap = float((found - expected).detach().abs().max())
    relative = [float((mine.float() - its).norm() / its.norm()) for mine, its in zip(ours, wanted, strict=True)]
    measure("chunked head in bf16", f"chunk {chunk or 'chosen'}", f"{gap:.2g} nats, gradients {max(relative):.2%}")
    assert gap < 0.05
    assert max(relative) < 0.02
