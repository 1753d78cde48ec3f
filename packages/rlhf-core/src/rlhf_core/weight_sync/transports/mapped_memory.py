"""Memory that several processes map: memory without a name on one host, and CUDA memory on one GPU."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError

Release = Callable[[], None]
"""Ends what a segment needs until everyone has mapped it."""


def shared_memory_id() -> str | None:
    """Equal in two processes exactly if one can map what the other makes there; None if there is no such memory.

    A segment is reached through its owner's process (`/proc/<pid>/fd`), so that both must be of one user, and see
    each other's processes: containers on one machine have the same boot, but each its own processes.
    """
    boot, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not hasattr(os, "memfd_create") or not boot.exists() or not processes.is_symlink():
        return None
    return f"{boot.read_text().strip()}:{os.readlink(processes)}:{os.getuid()}"


def file_segment(nbytes: int) -> tuple[Tensor, Any, Release]:
    """Memory of this process, its handle for others, and what to call when all have mapped it.

    It has no name in any file system: nothing is left of it when its processes are gone, however they ended.

    Raises:
        WeightSyncError: there is no room.
    """
    nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("rlhf-weights", os.MFD_CLOEXEC)
    name = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        # Reserved at once: writing to memory that cannot be had later would end the process with a bus error.
        os.posix_fallocate(descriptor, 0, nbytes)
        return map_file([name, nbytes]), [name, nbytes], functools.partial(os.close, descriptor)
    except OSError as error:
        os.close(descriptor)
        raise WeightSyncError(
            f"{nbytes >> 20} MiB of shared memory cannot be had: {error}; make bucket_bytes smaller, or use the "
            "transport gloo"
        ) from error


def map_file(handle: Any) -> Tensor:
    """The memory of a handle.

    Raises:
        WeightSyncError: this process cannot see it.
    """
    name, nbytes = handle
    try:
        return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise WeightSyncError(
            f"the sender's shared memory {name} cannot be mapped: {error}; shm works between processes of one user "
            "that see each other, use gloo or disk between hosts or containers"
        ) from error


def cuda_segment(nbytes: int, device: torch.device) -> tuple[Tensor, Any, Release]:
    """Memory of this process on its GPU, its handle for others, and nothing to call.

    Raises:
        WeightSyncError: not a CUDA device.
    """
    if device.type != "cuda":
        raise WeightSyncError(f"the weight transport ipc needs a CUDA device, got {device}; use shm on CPU")
    tensor = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
    parts = tensor.untyped_storage()._share_cuda_()
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    offset = tensor.storage_offset()
    return tensor, [gpu, offset, tensor.numel(), [_text(part) for part in parts]], lambda: None


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
