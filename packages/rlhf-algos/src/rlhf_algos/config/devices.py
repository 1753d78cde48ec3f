"""What `auto` means for device and dtype, in one place for all commands."""

from __future__ import annotations

from typing import Literal

import torch
from rlhf_core import DType, ResourceError


def choose_device(asked: str, *, elsewhere: bool = False) -> Literal["cpu", "cuda"]:
    """`auto` is cuda where torch finds a GPU. `elsewhere`: the work may run on other hosts than this one.

    Raises:
        ResourceError: cuda is asked for and there is none.
    """
    found = torch.cuda.is_available()
    if asked == "cuda" and not found and not elsewhere:
        raise ResourceError(
            "placement.device=cuda, but torch finds no GPU here; say cpu, or give a cluster's address"
        )
    if asked == "auto":
        return "cuda" if found else "cpu"
    return "cuda" if asked == "cuda" else "cpu"


def choose_dtype(asked: DType | Literal["auto"], device: str) -> DType:
    """`auto` is bfloat16 on a GPU and float32 on a CPU."""
    if asked != "auto":
        return asked
    return "bfloat16" if device.startswith("cuda") else "float32"
