"""Programs in containers of their own, by the command of docker or podman."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_core import CapabilityError, Program, ProgramLimit, ProgramLimits, SandboxError

from rlhf_rollout.sandbox.running import GRACE_S, LocalPrograms, RunningProgram

DEFAULT_IMAGE = "python:3.12-slim"
_START_S = 120.0
_KILLED = 137
_SCRIPT = 'cp /source/* . && exec timeout -s KILL "$0" "$@"'


class ContainerSandbox(LocalPrograms):
    """Sandbox of a container runtime. Tries at once whether programs can be run, which fetches no image.

    Raises:
        CapabilityError: neither docker nor podman is installed, or it does not run the image.
    """

    def __init__(self, image: str = DEFAULT_IMAGE) -> None:
        found = shutil.which("docker") or shutil.which("podman")
        if found is None:
            raise CapabilityError("there is neither docker nor podman on this machine")
        self._runtime, self._image = found, image
        try:
            outcome = self.run(
                Program(command=("python", "-c", "print('up')"), limits=ProgramLimits(wall_s=_START_S))
            )
        except SandboxError as error:
            raise CapabilityError(f"{found} cannot run the image {image!r}: {error}") from error
        if not outcome.ok or outcome.stdout != b"up\n":
            reason = outcome.stderr.decode(errors="replace").strip()[-300:]
            raise CapabilityError(f"{found} cannot run Python in the image {image!r}: {reason}")

    def close(self) -> None:
        """See Sandbox; nothing is held."""

    def start(self, program: Program, *, stdin: int, stdout: int) -> RunningProgram:
        """See LocalPrograms."""
        name = f"program-{secrets.token_hex(8)}"
        folder = Path(tempfile.mkdtemp(prefix="program-"))
        folder.chmod(0o755)
        for file, content in {"empty": b"", **program.files}.items():
            (folder / file).write_bytes(content)
            (folder / file).chmod(0o755)
        try:
            process = subprocess.Popen(
                self._command(program, name, folder), stdin=stdin, stdout=stdout, stderr=subprocess.PIPE
            )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise SandboxError(f"cannot start {self._runtime}: {error}") from error
        return _ContainerProgram(
            program=program,
            process=process,
            runtime=self._runtime,
            name=name,
            folder=folder,
            began=time.monotonic(),
        )

    def _command(self, program: Program, name: str, folder: Path) -> list[str]:
        limits = program.limits
        space = f"rw,exec,nosuid,mode=1777,size={limits.file_bytes},nr_inodes={limits.files}"
        variables = {"HOME": "/program", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **program.env_vars}
        return [
            *(self._runtime, "run", "--rm", "--interactive", "--name", name, "--init", "--pull", "never"),
            *("--network", "none", "--read-only", "--user", "65534:65534", "--workdir", "/program"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--ipc", "private"),
            *("--pids-limit", str(limits.processes + 3), "--memory", str(limits.memory_bytes)),
            *("--memory-swap", str(limits.memory_bytes), "--shm-size", str(limits.file_bytes)),
            *("--ulimit", "core=0", "--ulimit", f"fsize={limits.file_bytes}", "--ulimit", "nofile=256"),
            *("--tmpfs", f"/program:{space}", "--tmpfs", f"/tmp:{space}"),
            *("--mount", f"type=bind,source={folder},target=/source,readonly"),
            *(word for key, value in variables.items() for word in ("--env", f"{key}={value}")),
            *(self._image, "sh", "-c", _SCRIPT, f"{limits.wall_s:g}", *program.command),
        ]


@dataclass(kw_only=True, slots=True)
class _ContainerProgram(RunningProgram):
    runtime: str
    name: str
    folder: Path
    began: float
    code: int | None = None

    def kill(self) -> None:
        """See RunningProgram."""
        if self.code is not None:
            return
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0 if self.seconds() < self.program.limits.wall_s else 0.1)
        try:
            subprocess.run(
                [self.runtime, "rm", "--force", self.name], capture_output=True, timeout=3 * GRACE_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"{self.runtime} did not remove a container within {3 * GRACE_S:g} s") from error
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.code = self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def ended(self) -> tuple[int, ProgramLimit]:
        """See RunningProgram."""
        assert self.code is not None  # noqa: S101
        if self.code == 125:  # the runtime's own failure
            errors = b"".join(map(bytes, self.written.values())).decode(errors="replace").strip()
            raise SandboxError(f"{self.runtime} did not run a container: {errors[-300:]}")
        if self.code == _KILLED:
            return -9, "time" if self.seconds() >= self.program.limits.wall_s else "memory"
        return (128 - self.code if self.code > 128 else self.code), ""
