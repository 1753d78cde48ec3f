"""Temporary folders that know their owner, and a guard that ends what is left of an owner that was killed.

The guard is this file as a program. It needs nothing but Python itself, so that it starts at once and stays small.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_OWNER = ".owner"
_SHARED = Path("/dev/shm")
_GRACE_S = 1.0
"""What a killed owner's processes have to end by themselves: those that share its fate do so at once."""


class ScratchFolder:
    """A temporary folder of this process, for it and for the processes that it starts.

    It holds a file that is locked as long as the process lives, whatever ends it: a folder with that file unlocked
    has lost its owner. Folders without the file are of others and are left alone. When the owner is killed, a guard
    ends the processes that still write into the folder, and removes it with the shared memory that they had; where
    the guard was killed too, the next start does so.
    """

    def __init__(self, prefix: str, *, parent: Path) -> None:
        """Make a folder `<parent>/<prefix>...`, and clear away those of this prefix whose owners are dead."""
        clear_abandoned(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        unnamed = self.path / f"{_OWNER}.new"
        self._lock: int | None = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Locked before it has its name: no one must see it without its lock.
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(unnamed, self.path / _OWNER)
        command = [sys.executable, "-I", "-S", __file__, str(self.path)]
        # Whoever reads what this process prints must not wait for the guard, too.
        nowhere = subprocess.DEVNULL
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
        )

    def end_writers(self) -> None:
        """End every other process that writes into the folder, whatever state it is in."""
        _end_writers(self.path)

    def close(self, *, keep: bool = False) -> None:
        """Remove the folder, or `keep` it until the next start; may be called twice."""
        if self._lock is None:
            return
        if not keep:
            _remove(self.path)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._guard.communicate(b"closed", timeout=5)
        self._guard.kill()
        os.close(self._lock)
        self._lock = None


def clear_abandoned(prefix: str, parent: Path) -> list[Path]:
    """Remove the folders of this prefix whose owners are dead, with what still works there; returns them."""
    return [folder for folder in parent.glob(f"{prefix}*") if _clear(folder)]


def _clear(folder: Path) -> bool:
    """Remove a folder, and end the processes that write into it, if its owner is dead."""
    try:
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, another user's, or not of this kind
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shared = _end_writers(folder)
        for file in shared - _shared_memory(_processes()):
            file.unlink(missing_ok=True)
        _remove(folder)
        return True
    finally:
        os.close(lock)


def _end_writers(folder: Path) -> set[Path]:
    """End every process that has a file of the folder open for writing; returns the shared memory that they had."""
    shared: set[Path] = set()
    for _ in range(100):
        writers = [pid for pid in _processes() if _writes_into(pid, folder)]
        shared |= _shared_memory(writers)
        for pid in writers:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not writers:
            break
        time.sleep(0.05)
    return shared


def _processes() -> list[int]:
    """Every other process of this host that can be looked into."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _writes_into(pid: int, folder: Path) -> bool:
    inside = f"{folder}{os.sep}"
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith(inside) and _for_writing(pid, name):
                    return True
    return False


def _for_writing(pid: int, name: str) -> bool:
    flags = Path(f"/proc/{pid}/fdinfo/{name}").read_text().split("flags:")[1].split()[0]
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _shared_memory(processes: list[int]) -> set[Path]:
    """Files of shared memory that the processes have open or mapped."""
    return {Path(name) for pid in processes for name in _mapped(pid) if name.startswith(f"{_SHARED}{os.sep}")}


def _mapped(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            yield from line.split(maxsplit=5)[5:]


def _remove(folder: Path) -> None:
    """Remove a folder, the owner's file last: what cannot be removed now is known as abandoned later."""
    for inner in folder.iterdir():
        if inner.name == _OWNER:
            continue
        if inner.is_dir() and not inner.is_symlink():
            shutil.rmtree(inner, ignore_errors=True)
        else:
            inner.unlink(missing_ok=True)
    if [inner.name for inner in folder.iterdir()] == [_OWNER]:
        shutil.rmtree(folder, ignore_errors=True)


def guard(folder: Path) -> None:
    """Wait for the owner's end; unless it says that it has closed the folder, clear that away."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to all processes of a job: the owner is the one to act
    if sys.stdin.buffer.read():
        return
    shared = _shared_memory([pid for pid in _processes() if _writes_into(pid, folder)])
    time.sleep(_GRACE_S)
    _clear(folder)
    for file in shared - _shared_memory(_processes()):
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
