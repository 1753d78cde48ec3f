"""The kernels for attention among the segments of a packed row.

`sdpa` runs anywhere: one call per segment. On CUDA `varlen` runs all segments in one flash-attention call, and
`blocks` in one FlexAttention call that skips the blocks no token attends to. Each computes the same, or refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Literal

import torch

from rlhf_core.model.attention.cuda import block_segments, varlen_function, varlen_segments
from rlhf_core.model.attention.segments import SegmentAttention, sdpa_segments

Kernel = Literal["sdpa", "varlen", "blocks"]

SEGMENT_ATTENTION: dict[Kernel, SegmentAttention] = {
    "sdpa": sdpa_segments,
    "varlen": varlen_segments,
    "blocks": block_segments,
}
"""The function of each kernel."""

_SMALLEST_BLOCK_HEAD = 16
"""FlexAttention's compiled kernels take no narrower heads."""


def kernels_for(device: torch.device, dtype: torch.dtype, head_dims: Collection[int]) -> Sequence[Kernel]:
    """Kernels that may run heads of these sizes there, the fastest first; `sdpa` is always the last."""
    if device.type != "cuda":
        return ("sdpa",)
    found: list[Kernel] = []
    if (
        dtype in (torch.float16, torch.bfloat16)
        and all(head_dim % 8 == 0 for head_dim in head_dims)
        and varlen_function() is not None
    ):
        found.append("varlen")
    if find_spec("triton") is not None and min(head_dims) >= _SMALLEST_BLOCK_HEAD:
        found.append("blocks")
    return (*found, "sdpa")
