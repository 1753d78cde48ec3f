"""A control group (cgroup) for one program, where this process may make one; version 1 or 2.

The first process of a sandbox holds every bound by itself. A control group holds memory and processes where it
could be too late: between two of its looks, and for memory that it cannot see.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rlhf_core import ProgramLimits

_ROOT = Path("/sys/fs/cgroup")
_ROOM = 64 << 20
"""Bytes for the first process and the kernel's own."""
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlGroup:
    """The folders of a group: one for each controller, or one for all."""

    folders: tuple[Path, ...]

    @staticmethod
    def make(limits: ProgramLimits, process: int) -> ControlGroup | None:
        """Put a process into a group of its own; None where that is not permitted."""
        parents = _parents()
        if not parents:
            return None
        name = f"program-{os.getpid()}-{next(_numbers)}"
        group = ControlGroup(folders=tuple(parent / name for parent in parents))
        memory = limits.memory_bytes + 3 * limits.file_bytes + _ROOM
        bounds = {
            "memory.limit_in_bytes": memory,
            "memory.memsw.limit_in_bytes": memory,
            "memory.max": memory,
            "memory.swap.max": 0,
            "memory.oom.group": 1,
            "pids.max": limits.processes + 2,
        }
        try:
            for folder in group.folders:
                folder.mkdir()
                for bound, value in bounds.items():
                    if (folder / bound).exists():
                        (folder / bound).write_text(str(value))
                (folder / "cgroup.procs").write_text(str(process))
        except OSError:
            group.close()
            return None
        return group

    def close(self) -> bool:
        """Remove the group, whose processes have ended; returns whether memory was refused to it."""
        refused = False
        for folder in self.folders:
            with contextlib.suppress(OSError, ValueError):
                refused = refused or _memory_refused(folder)
            for _ in range(100):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)
        return refused


def _memory_refused(folder: Path) -> bool:
    """Whether the kernel has killed in the group for want of memory."""
    for name in ("memory.oom_control", "memory.events"):
        if (file := folder / name).exists():
            rows = dict(line.split() for line in file.read_text().splitlines())
            return int(rows.get("oom_kill", 0)) > 0
    return False


@lru_cache(maxsize=1)
def _parents() -> tuple[Path, ...]:
    """The groups of this process below which it may make others; found once."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in ("memory", "pids"):
                if controller in controllers.split(","):
                    found.append(_ROOT / controller / path.lstrip("/"))
            if not controllers and (_ROOT / "cgroup.controllers").exists():
                own = _ROOT / path.lstrip("/")
                if {"memory", "pids"} <= set((own / "cgroup.subtree_control").read_text().split()):
                    found.append(own)
    return tuple(parent for parent in found if _may_make(parent))


def _may_make(parent: Path) -> bool:
    trial = parent / f"program-trial-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return True
