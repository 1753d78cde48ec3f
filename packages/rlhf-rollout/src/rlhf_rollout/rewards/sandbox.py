"""Running a program that a model wrote: in a killable process with limits, without network where the system allows.

On Linux the program gets user, network, process and IPC namespaces of its own: no interface but a dead loopback,
and when its first process ends, everything it started is gone. Where namespaces are not permitted the limits and
the deadline hold all the same, but the network is there and a child that detaches itself may outlive the program;
`namespaces_available` tells. Files are not fenced off: the program can do to them what its user can. Run untrusted
code in a container, or under a user that owns nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from rlhf_core import CapabilityError, ConfigError

Status = Literal["ok", "error", "timeout", "output"]
"""`ok`: exit code 0; `error`: another one, or a signal; `timeout`: killed at its deadline; `output`: wrote too
much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """What a program may use."""

    wall_s: float = 10.0
    """Seconds until it is killed. Its processor time is limited to as much."""
    memory_bytes: int = 512 << 20
    """Address space of each of its processes."""
    output_bytes: int = 64 << 10
    """Largest file that it may write, standard output and error included."""
    processes: int = 32
    """Processes and threads at the same time; held where namespaces are available."""
    network: Literal["off", "off_if_possible"] = "off_if_possible"
    """`off` refuses to run anything where the network cannot be taken away."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "memory_bytes", "output_bytes", "processes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"program limits: {name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """How a program ended and what it wrote."""

    status: Status
    exit_code: int
    """Negative: the signal that ended it."""
    stdout: str
    stderr: str


def run_program(source: str, *, stdin: str = "", limits: ProgramLimits | None = None) -> ProgramResult:
    """Run Python source in a fresh directory and an empty environment; blocks until it ended or was killed.

    Raises:
        CapabilityError: the limits demand `network: off`, and this system does not permit it.
    """
    limits = limits or ProgramLimits()
    isolated = namespaces_available()
    if limits.network == "off" and not isolated:
        raise CapabilityError(
            "programs must run without network, but this system permits no user namespaces; allow them "
            "(sysctl kernel.unprivileged_userns_clone, or the container's seccomp profile), or write "
            "off_if_possible"
        )
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "main.py").write_text(source, encoding="utf-8", errors="replace")
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        code, late = _run(folder, limits, isolated)
        output, errors = (_read(folder / part, limits.output_bytes) for part in ("stdout", "stderr"))
        full = any((folder / part).stat().st_size >= limits.output_bytes for part in ("stdout", "stderr"))
    status: Status = "timeout" if late else "ok" if code == 0 else "output" if full else "error"
    return ProgramResult(status=status, exit_code=code, stdout=output, stderr=errors)


@lru_cache(maxsize=1)
def namespaces_available() -> bool:
    """Whether a program can be given namespaces of its own; tried once."""
    with tempfile.TemporaryDirectory(prefix="program-") as name:
        folder = Path(name)
        (folder / "main.py").write_text("print('up')")
        (folder / "stdin").touch()
        code, late = _run(folder, ProgramLimits(wall_s=30), True)
        return code == 0 and not late and (folder / "stdout").read_text() == "up\n"


def _run(folder: Path, limits: ProgramLimits, isolated: bool) -> tuple[int, bool]:
    """Exit code (negative: signal), and whether it was killed at the deadline."""
    command = [sys.executable, "-I", "-c", _LAUNCHER, str(int(isolated))]
    command += [
        str(int(limits.wall_s) + 1),
        str(limits.memory_bytes),
        str(limits.output_bytes),
        str(limits.processes),
    ]
    with (
        open(folder / "stdin", "rb") as stdin,
        open(folder / "stdout", "wb") as stdout,
        open(folder / "stderr", "wb") as stderr,
    ):
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            return _exit_code(process.wait(limits.wall_s)), False
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL, True
        finally:
            # Also after an orderly end: what the program started in the background must not stay.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _exit_code(code: int) -> int:
    """The launcher passes a signal on as 128 + its number, as shells do."""
    return 128 - code if code > 128 else code


def _read(path: Path, most: int) -> str:
    with open(path, "rb") as file:
        return file.read(most).decode(errors="replace")


# Runs in the new process before the program. Not `preexec_fn`: that forks from a process with threads.
_LAUNCHER = """
import ctypes, os, resource, signal, sys
isolated, seconds, memory, output, processes = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
def die_with_parent():
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
if isolated:
    NEWIPC, NEWUSER, NEWPID, NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
    if libc.unshare(NEWIPC | NEWUSER | NEWPID | NEWNET):
        sys.exit("no namespaces: " + os.strerror(ctypes.get_errno()))
    # The first child is the first process of the new process namespace: with it everything in there ends.
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (output, output))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.execv(sys.executable, [sys.executable, "-I", "main.py"])
"""
