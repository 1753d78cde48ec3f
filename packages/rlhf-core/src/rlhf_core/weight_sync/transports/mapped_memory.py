"""Memory that processes of a host map together, and which processes can."""

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
    descriptor, name = tempfile.mkstemp(prefix="rlhf-weights-", dir=directory)
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
