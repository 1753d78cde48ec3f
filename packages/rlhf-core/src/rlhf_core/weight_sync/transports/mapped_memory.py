"""Memory that several processes map: files in shared memory on one host, and CUDA memory on one GPU."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError


def shared_memory_id() -> str | None:
    """Equal in two processes exactly if one can map what the other makes there; None if there is no such memory.

    Containers on one machine have the same boot, but each its own tmpfs, so that both have to agree. Segments can
    be opened by their owner alone.
    """
    directory = Path("/dev/shm")
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not os.access(directory, os.W_OK) or not boot.exists():
        return None
    return f"{boot.read_text().strip()}:{directory.stat().st_dev}:{os.getuid()}"


def file_segment(nbytes: int) -> tuple[Tensor, Any, list[Path]]:
    """Memory of this process, its handle for others, and the file whose removal makes it anonymous.

    Raises:
        WeightSyncError: there is no room.
    """
    directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor, name = tempfile.mkstemp(prefix=f"rlhf-weights-{os.getpid()}-", dir=directory)
    try:
        # Reserved at once: writing to a full tmpfs later would end the process with a bus error.
        os.posix_fallocate(descriptor, 0, nbytes)
        return map_file([name, nbytes]), [name, nbytes], [Path(name)]
    except OSError as error:
        Path(name).unlink()
        raise WeightSyncError(
            f"{nbytes >> 20} MiB of shared memory cannot be had in {directory}: {error}; give it more room (for a "
            "container, --shm-size), make bucket_bytes smaller, or use the transport gloo"
        ) from error
    finally:
        os.close(descriptor)


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
            f"the sender's shared memory {name} cannot be mapped: {error}; shm works between processes of one host "
            "and user, use gloo or disk between hosts"
        ) from error


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
