"""Programs as plain processes: no sandbox at all, for where somebody asks for it by name."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_core import Program, ProgramLimit, SandboxError

from rlhf_rollout.sandbox.running import LocalPrograms, RunningProgram

# Runs in the new process, in place of a function between fork and exec: this process has threads.
_LIMITED = """
import os, resource, sys
seconds, memory, size = map(int, sys.argv[1:4])
for kind, bound in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_DATA, memory), (resource.RLIMIT_FSIZE, size),
                    (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (bound, bound))
os.execvp(sys.argv[4], sys.argv[4:])
"""


class UnconfinedSandbox(LocalPrograms):
    """Programs in a fresh folder, with limits for each process and a deadline, and nothing else: no sandbox.

    They reach files, network and processes as this user does, and what detaches itself outlives its program.
    """

    def close(self) -> None:
        """See Sandbox; nothing is held."""

    def start(self, program: Program, *, stdin: int, stdout: int) -> RunningProgram:
        """See LocalPrograms."""
        limits = program.limits
        folder = tempfile.mkdtemp(prefix="program-")
        for name, content in program.files.items():
            path = Path(folder, name)
            path.write_bytes(content)
            path.chmod(0o755)
        numbers = (int(limits.wall_s) + 1, limits.memory_bytes, limits.file_bytes)
        path = os.pathsep.join([f"{sys.prefix}/bin", os.environ.get("PATH", os.defpath)])
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LIMITED, *map(str, numbers), *program.command],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={
                    "PATH": path,
                    "HOME": folder,
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "PYTHONSAFEPATH": "1",
                    "PYTHONPATH": sysconfig.get_path("purelib"),
                    "OMP_NUM_THREADS": "1",
                    **program.env_vars,
                },
                start_new_session=True,
            )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise SandboxError(f"cannot start a program: {error}") from error
        return _PlainProgram(
            program=program, process=process, folder=folder, deadline=time.monotonic() + limits.wall_s
        )


@dataclass(kw_only=True, slots=True)
class _PlainProgram(RunningProgram):
    folder: str
    deadline: float
    code: int | None = None

    def time_left(self) -> float:
        """See RunningProgram."""
        return self.deadline - time.monotonic()

    def kill(self) -> None:
        """See RunningProgram."""
        if self.code is not None:
            return
        if (ended := self.process.poll()) is None and self.time_left() > 0:
            # Its pipes are closed; what is left of it is its exit.
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended = self.process.wait(0.2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.code = self.process.wait() if ended is None else ended
        shutil.rmtree(self.folder, ignore_errors=True)

    def ended(self) -> tuple[int, ProgramLimit]:
        """See RunningProgram."""
        assert self.code is not None  # noqa: S101
        return self.code, "time" if self.code == -signal.SIGXCPU else ""
