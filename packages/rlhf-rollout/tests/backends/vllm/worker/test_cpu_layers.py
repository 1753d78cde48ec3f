from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")


def norms(size: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """A layer as vLLM runs it on a CPU, and the same with the kernels."""
    from rlhf_rollout.backends.vllm.worker.cpu_layers import normalize_by_kernel
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    with set_current_vllm_config(VllmConfig()):
        plain, ours = RMSNorm(size, eps=1e-5, dtype=dtype), RMSNorm(size, eps=1e-5, dtype=dtype)
    weight = torch.randn(size).to(dtype)
    for layer in (plain, ours):
        layer.weight.data.copy_(weight)
    normalize_by_kernel(nn.ModuleList([ours]))
    assert ours._forward_method != ours.forward_native
    return plain, ours


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@torch.inference_mode()
def test_kernels_give_the_norms_of_torch(dtype: torch.dtype, apart: float) -> None:
    plain, ours = norms(96, dtype)
    x, residual = torch.randn(2, 7, 96).to(dtype)
    torch.testing.assert_close(ours(x.clone()), plain(x.clone()), rtol=apart, atol=apart)
    theirs, added = plain(x.clone(), residual.clone())
    found, sums = ours(x.clone(), residual.clone())
    torch.testing.assert_close(found, theirs, rtol=apart, atol=apart)
    torch.testing.assert_close(sums, added, rtol=apart, atol=apart)


@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company() -> None:
    _, ours = norms(96, torch.float32)
    x = torch.randn(9, 96)
    assert torch.equal(ours(x.clone())[4], ours(x[4:5].clone())[0])


@torch.inference_mode()
def test_what_the_kernels_do_not_take_goes_the_old_way() -> None:
    plain, ours = norms(32, torch.float32)
    heads = torch.randn(5, 4, 96)[:, :, 32:64]
    assert torch.equal(ours(heads), plain(heads))
    doubles = torch.randn(5, 32, dtype=torch.float64)
    assert torch.equal(ours(doubles), plain(doubles))


def test_a_norm_of_a_part_of_its_input_is_left_alone() -> None:
    from rlhf_rollout.backends.vllm.worker.cpu_layers import normalize_by_kernel
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    with set_current_vllm_config(VllmConfig()):
        layer = RMSNorm(64, var_hidden_size=32)
    before = layer._forward_method
    normalize_by_kernel(nn.ModuleList([layer]))
    assert layer._forward_method == before


def activations() -> tuple[Any, Any]:
    """silu(gate) * up as vLLM runs it on a CPU, and by the kernel."""
    from rlhf_rollout.backends.vllm.worker.cpu_layers import activate_by_kernel
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul

    with set_current_vllm_config(VllmConfig()):
        plain, ours = SiluAndMul(), SiluAndMul()
    activate_by_kernel(nn.ModuleList([ours]))
    assert ours._forward_method != ours.forward_cpu
    return plain, ours


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@torch.inference_mode()
def test_the_kernel_gives_the_activation_of_torch(dtype: torch.dtype, apart: float) -> None:
    plain, ours = activations()
    for rows, size in ((7, 64), (3, 1536), (5, 24)):  # the last is one that the kernel does not take
        x = 4 * torch.randn(rows, 2 * size).to(dtype)
        torch.testing.assert_close(ours(x.clone()), plain(x.clone()), rtol=apart, atol=apart)
    x = torch.randn(9, 2 * 64).to(dtype)
    assert torch.equal(ours(x.clone())[4], ours(x[4:5].clone())[0])  # in any company
