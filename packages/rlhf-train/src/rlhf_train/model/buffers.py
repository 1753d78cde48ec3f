"""Buffers of a model that was created sharded, as the model has them elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import torch
from rlhf_core import CapabilityError
from torch import nn


def restore_buffers(model: Any, dtype: torch.dtype) -> list[str]:
    """Compute the buffers again that ZeRO-3's creation rounded; returns their names.

    While parameters are created sharded, DeepSpeed turns every floating tensor that a constructor makes into the
    type of the weights. Rotary frequencies, which a model keeps and multiplies by the position in float32, then
    have 8 bits: at position 4,000 an angle can be off by a whole turn. No checkpoint holds them. Which dtype each
    has by the model's own code is seen on the meta device, and its values come from the model's `_init_weights`.

    Raises:
        CapabilityError: the model's code cannot compute one of them again.
    """
    with torch.device("meta"):
        plain = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    wanted = {name: buffer.dtype for name, buffer in plain.named_buffers() if buffer.is_floating_point()}
    kept = set(model.state_dict(keep_vars=True))
    rounded = [
        name
        for name, buffer in model.named_buffers()
        if name not in kept and buffer.dtype != wanted.get(name, buffer.dtype)
    ]
    _compute_again(model, rounded, wanted)
    if unknown := [name for name in rounded if model.get_buffer(name).isnan().any()]:
        raise CapabilityError(
            f"engine options: stage 3 in 16 bits rounds {', '.join(unknown)} of {type(model).__name__}, which its "
            "code cannot compute again (`_init_weights`); use stage 2, or dtype float32"
        )
    return rounded


def _compute_again(model: Any, names: list[str], dtypes: dict[str, torch.dtype]) -> None:
    owners: dict[str, None] = {name.rpartition(".")[0]: None for name in names}
    others = [tensor for tensor in model.parameters() if not getattr(tensor, "_is_hf_initialized", False)]
    for tensor in others:
        # What has this mark is left alone by Transformers' functions that initialise.
        tensor._is_hf_initialized = True
    for name in names:
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        module._buffers[own] = torch.full_like(module._buffers[own], float("nan"), dtype=dtypes[name])
    for owner in owners:
        with torch.no_grad():
            _initialiser(model, owner)._init_weights(model.get_submodule(owner))
    for tensor in others:
        del tensor._is_hf_initialized


def _initialiser(model: Any, owner: str) -> Any:
    """The innermost model of Transformers around a module, which knows how its parts begin."""
    found, path = model, []
    for part in filter(None, owner.split(".")):
        path.append(part)
        module: nn.Module = model.get_submodule(".".join(path))
        if callable(getattr(module, "_init_weights", None)):
            found = module
    return found
