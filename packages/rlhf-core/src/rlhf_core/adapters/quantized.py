"""Models whose linear layers hold 4-bit codes (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), by bitsandbytes.

The codes are made from the checkpoint when it is loaded, the same on every rank and at every start, and never
change. So a quantised model is treated as one of the ordinary kind that keeps some weights in a compact form:
whatever leaves the engine (weights for a sync, an export) is put back to full precision by `dequantized`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError


def quantized_loading(kind: str, *, dtype: torch.dtype, device: torch.device, extra: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise linear layers to `kind` (nf4 or fp4), heads left out.

    Args:
        kind: the 4-bit data type.
        dtype: in which layers compute.
        device: where the codes are to be; they are made there.
        extra: what to install if bitsandbytes is missing, for the message.

    Raises:
        ConfigError: bitsandbytes or accelerate is not installed.
    """
    try:
        import accelerate  # noqa: F401
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"lora: quantize {kind!r} needs {error.name}; install {extra}") from None
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )
    return {"quantization_config": settings, "device_map": {"": str(device)}}


BYTES_OF_CODE = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a value in 4 bits: its code, a scale of a byte for 64 of them, and one of float32 for 256 scales."""


def quantized_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers that `quantized_loading` puts into 4 bits: all frozen ones but heads."""
    heads = {id(module) for name, module in model.named_modules() if name.rpartition(".")[2] == "score"}
    find_head: Any = getattr(model, "get_output_embeddings", None)
    if find_head is not None:
        heads.add(id(find_head()))
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and id(module) not in heads and not module.weight.requires_grad
    ]


def settle_quantized(model: Any) -> None:
    """Make a model loaded with `quantized_loading` ready for training and for an ordinary export.

    Raises:
        ConfigError: the model had no layer to quantise.
    """
    layers = [module for module in model.modules() if is_quantized(getattr(module, "weight", None))]
    if not layers:
        raise ConfigError(f"lora: quantize finds no linear layer in {type(model).__name__}; leave it out")
    for layer in layers:
        # In evaluation bitsandbytes would repack the codes for the CPU's bfloat16 instructions, in place, and a
        # forward pass in training would then return outputs without a gradient.
        layer.support_avx512bf16_for_cpu = False
        layer.register_state_dict_post_hook(_only_codes)
    # What is exported is of full precision, and its config must not say otherwise.
    model.hf_quantizer = None
    del model.config.quantization_config
    for name in ("hf_device_map", "quantization_method"):
        if name in vars(model):
            delattr(model, name)


def _only_codes(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Leave out the scales of the codes: they come with the base model."""
    for name in [name for name in state if name.startswith(prefix + "weight.")]:
        del state[name]


def is_quantized(parameter: Any) -> bool:
    """Whether the parameter holds 4-bit codes in place of values."""
    return getattr(parameter, "quant_state", None) is not None


def dequantized(parameter: Any) -> Tensor:
    """The parameter's values, detached: itself, or a new tensor made of its codes."""
    if not is_quantized(parameter):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    state = parameter.quant_state
    return dequantize_4bit(parameter.detach().view(-1, 1), state).view(state.shape)


def outline(parameter: Any) -> Tensor:
    """A tensor without storage (device `meta`) of the shape and dtype of the parameter at full precision."""
    if is_quantized(parameter):
        return torch.empty(tuple(parameter.quant_state.shape), dtype=parameter.quant_state.dtype, device="meta")
    shape = getattr(parameter, "full_shape", None) or tuple(getattr(parameter, "ds_shape", parameter.shape))
    return torch.empty(shape, dtype=parameter.dtype, device="meta")


def restore_linear_layers(model: nn.Module) -> None:
    """Put an ordinary linear layer, of the values that its codes stand for, in the place of every 4-bit one."""
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            weight = getattr(layer, "weight", None)
            if not is_quantized(weight):
                continue
            values = dequantized(weight)
            bias: Any = getattr(layer, "bias", None)
            whole = nn.Linear(values.shape[1], values.shape[0], bias=bias is not None, device="meta")
            whole.weight = nn.Parameter(values)
            if bias is not None:
                whole.bias = nn.Parameter(bias.detach().to(values.dtype))
            setattr(owner, name, whole)
