"""Which processes can map the same memory, and where that memory lies."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def shared_directory() -> str:
    """Where segments of shared memory are made: tmpfs if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


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
