"""What `auto` means for device and dtype, in one place for all commands."""

from __future__ import annotations

from typing import Literal

import torch
from rlhf_core import DType, ResourceError


def choose_device(asked: str, *, gpus: int | None = None) -> Literal["cpu", "cuda"]:
    """`auto` is cuda where there is a GPU.

    Args:
        asked: `auto`, `cpu` or `cuda`.
        gpus: how many there are where the work runs; looked for on this host if not given.

    Raises:
        ResourceError: cuda is asked for and there is none.
    """
    found = torch.cuda.is_available() if gpus is None else gpus > 0
    if asked == "cuda" and not found:
        where = "torch finds no GPU here" if gpus is None else "there is no GPU where the workers would run"
        raise ResourceError(f"placement.device=cuda, but {where}; say cpu, or give the address of another cluster")
    if asked == "auto":
        return "cuda" if found else "cpu"
    return "cuda" if asked == "cuda" else "cpu"


def choose_dtype(asked: DType | Literal["auto"], device: str) -> DType:
    """`auto` is bfloat16 on a GPU and float32 on a CPU."""
    if asked != "auto":
        return asked
    return "bfloat16" if device.startswith("cuda") else "float32"
