"""Memory of a GPU that processes on it map together, by CUDA's handles for inter-process communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError


def cuda_segment(nbytes: int, device: torch.device) -> tuple[Tensor, Any, list[Path]]:
    """Memory of this process on its GPU, and its handle for others; no files.

    Raises:
        WeightSyncError: not a CUDA device.
    """
    if device.type != "cuda":
        raise WeightSyncError(f"the weight transport ipc needs a CUDA device, got {device}; use shm on CPU")
    tensor = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
    parts = tensor.untyped_storage()._share_cuda_()
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    offset = tensor.storage_offset()
    return tensor, [gpu, offset, tensor.numel(), [_text(part) for part in parts]], []


def map_cuda(handle: Any, device: torch.device) -> Tensor:
    """The memory of a handle.

    Raises:
        WeightSyncError: it is on another GPU.
    """
    gpu, offset, nbytes, parts = handle
    own = str(torch.cuda.get_device_properties(device).uuid)
    if own != gpu:
        raise WeightSyncError(
            f"the sender's memory is on GPU {gpu}, this receiver is on {own}; use nccl between GPUs"
        )
    index = device.index if device.index is not None else torch.cuda.current_device()
    # The first part is the sender's number of the GPU, which differs with CUDA_VISIBLE_DEVICES.
    storage = torch.UntypedStorage._new_shared_cuda(index, *(_untext(part) for part in parts[1:]))
    whole: Any = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, offset, (nbytes,))


def _text(part: Any) -> Any:
    """CUDA handles as JSON: no pickle."""
    return {"hex": part.hex()} if isinstance(part, bytes) else part


def _untext(part: Any) -> Any:
    return bytes.fromhex(part["hex"]) if isinstance(part, dict) else part
