"""DeepSpeed's AutoTP: consecutive ranks run the same rows, each with a slice of every layer's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


def note_full_shapes(model: nn.Module) -> None:
    """Note the shape of the whole on sliced parameters (`full_shape`, which `rlhf_core.outline` reads)."""
    for module in model.modules():
        for name in ("weight", "bias"):
            parameter: Any = getattr(module, name, None)
            if isinstance(parameter, nn.Parameter) and hasattr(parameter, "gather_params"):
                parameter.full_shape = tuple(getattr(module, f"_orig_{name}_shape"))  # type: ignore[attr-defined]


@contextlib.contextmanager
def whole_layers(parameters: Sequence[Any]) -> Iterator[None]:
    """A context in which sliced parameters have their full values on every rank; all ranks enter it together."""
    sliced = [parameter for parameter in parameters if hasattr(parameter, "gather_params")]
    # ZeRO updates the slices where they lie, in its flat buffers: these very tensors must come back.
    before = [parameter.data for parameter in sliced]
    try:
        with torch.no_grad():
            for parameter in sliced:
                parameter.gather_params([parameter])
        yield
    finally:
        for parameter, data in zip(sliced, before, strict=True):
            parameter.data = data
