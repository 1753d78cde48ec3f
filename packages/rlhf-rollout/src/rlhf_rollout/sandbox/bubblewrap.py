"""Programs in namespaces of their own, by `bwrap` (bubblewrap) on Linux, as root and as any other user.

As root a program becomes a user that nobody else is. As another user it needs user namespaces. What it sees:
`/usr`, the interpreter and its packages, read-only; `/program`, `/tmp` and `/dev/shm`, which are empty, bounded,
and gone with it; a `/proc` with its own processes only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from rlhf_core import CapabilityError, Program, ProgramLimit, ProgramLimits, SandboxError

from rlhf_rollout.sandbox import first_process
from rlhf_rollout.sandbox.control_group import ControlGroup
from rlhf_rollout.sandbox.running import GRACE_S, LocalPrograms, PipeEnd, RunningProgram, pipe

Separation = Literal["own_user", "user_namespace"]
"""`own_user`: root starts the program as a user that nobody else is; `user_namespace`: as the caller's own user."""

_FIRST_USER, _USERS = 1_600_000_000, 400_000_000
_ETC = ("alternatives", "ld.so.cache", "localtime")
_LIMITS = ("time", "memory", "processes", "files")


class BubblewrapSandbox(LocalPrograms):
    """Sandbox of `bwrap`. Tries at once whether programs can be run.

    Raises:
        CapabilityError: `bwrap` is not installed, or the system does not let it make namespaces.
    """

    def __init__(self) -> None:
        found = shutil.which("bwrap")
        if sys.platform != "linux" or found is None:
            raise CapabilityError("there is no bwrap on this machine; install it (Debian, Ubuntu: bubblewrap)")
        self._bwrap = found
        self._first_process = Path(first_process.__file__).read_text()
        ways: tuple[Separation, ...] = ("own_user", "user_namespace") if os.geteuid() == 0 else ("user_namespace",)
        reasons = []
        for way in ways:
            self.separation: Separation = way
            try:
                outcome = self.run(_TRIAL)
            except SandboxError as error:
                reasons.append(f"{way}: {error}")
                continue
            if outcome.ok and outcome.stdout == b"up\n":
                return
            reasons.append(f"{way}: {outcome.stderr.decode(errors='replace').strip()[:300] or outcome.limit}")
        raise CapabilityError(
            f"bwrap cannot run programs for this user ({'; '.join(reasons)}); permit user namespaces (the "
            "container's seccomp profile, sysctl user.max_user_namespaces), or use another sandbox"
        )

    def close(self) -> None:
        """See Sandbox; nothing is held."""

    def start(self, program: Program, *, stdin: int, stdout: int) -> RunningProgram:
        """See LocalPrograms."""
        with contextlib.ExitStack() as ends, contextlib.ExitStack() as undo:
            outcome_in, outcome_out = pipe(ends)
            info_in, info_out = pipe(ends)
            gate_in, gate_out = pipe(ends)
            files = {name: _memory_file(ends, content) for name, content in program.files.items()}
            user = _FIRST_USER + secrets.randbelow(_USERS) if self.separation == "own_user" else 0
            command = [
                *(self._bwrap, "--info-fd", str(info_out.number), "--block-fd", str(gate_in.number)),
                *self._namespaces,
                *_file_system(program, files),
                *_environment(program),
                "--",
                *(_interpreter(), "-I", "-S", "-c", self._first_process),
                *map(str, (outcome_out.number, user, *_numbers(program.limits))),
                *program.command,
            ]
            try:
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=subprocess.PIPE,
                    pass_fds=(outcome_out.number, info_out.number, gate_in.number, *files.values()),
                    cwd="/",
                    env={},
                )
            except OSError as error:
                raise SandboxError(f"cannot start bwrap: {error}") from error
            undo.callback(process.wait)
            undo.callback(process.kill)
            info_out.close()
            first = _first_process_of(process, info_in.number)
            group = ControlGroup.make(program.limits, first)
            first_process_descriptor = os.pidfd_open(first)
            gate_out.close()
            undo.pop_all()
            return _BubblewrapProgram(
                program=program,
                process=process,
                first=first_process_descriptor,
                outcome=os.dup(outcome_in.number),
                group=group,
            )

    @cached_property
    def _namespaces(self) -> list[str]:
        """Arguments for what the program does not share."""
        kinds = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        rest = ["--as-pid-1", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
        if self.separation == "own_user":
            return [*kinds, *rest]
        return [*kinds, "--unshare-user", *_no_more_users(self._bwrap), *rest, "--cap-drop", "ALL"]


@dataclass(kw_only=True, slots=True)
class _BubblewrapProgram(RunningProgram):
    """`bwrap` and the first process of its namespace."""

    first: int
    """Descriptor (pidfd) of the first process; with it everything in the namespace ends."""
    outcome: int
    """Pipe on which the first process says how the program ended."""
    group: ControlGroup | None
    said: str | None = None
    """What the first process has said; None while the program is not gone."""

    def kill(self) -> None:
        """See RunningProgram."""
        if self.said is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.first, signal.SIGKILL)
        # Readable once the kernel has killed and reaped all of the namespace.
        waiting = select.poll()
        waiting.register(self.first, select.POLLIN)
        ended = waiting.poll(1000 * GRACE_S)
        self.process.kill()
        self.process.wait()
        self.said = os.read(self.outcome, 100).decode() if ended else ""
        os.close(self.first)
        os.close(self.outcome)
        if self.group is not None:
            self.group.close()
        if not ended:
            raise SandboxError(f"processes of a program did not end within {GRACE_S:g} s of being killed")

    def ended(self) -> tuple[int, ProgramLimit]:
        """See RunningProgram."""
        code, _, limit = (self.said or "").partition(" ")
        if code:
            return int(code), limit if limit in _LIMITS else ""  # type: ignore[return-value]
        # Killed without a word: by the kernel, at a bound of the group.
        return -signal.SIGKILL, "memory"


def _memory_file(ends: contextlib.ExitStack, content: bytes) -> int:
    end = PipeEnd(os.memfd_create("file"))
    ends.callback(end.close)
    with os.fdopen(os.dup(end.number), "wb") as file:
        file.write(content)
    os.lseek(end.number, 0, os.SEEK_SET)
    return end.number


def _first_process_of(process: subprocess.Popen[bytes], info: int) -> int:
    """Process number of the first process in the sandbox, which waits."""
    said, deadline = b"", time.monotonic() + GRACE_S
    waiting = select.poll()
    waiting.register(info, select.POLLIN)
    while time.monotonic() < deadline and waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
        part = os.read(info, 4096)
        said += part
        if not part or b"}" in said:
            break
    with contextlib.suppress(ValueError, KeyError):
        return int(json.loads(said)["child-pid"])
    process.kill()
    process.wait()
    assert process.stderr is not None  # noqa: S101
    with process.stderr as errors:
        reason = errors.read().decode(errors="replace").strip()
    raise SandboxError(f"bwrap did not start a program: {reason[:500] or f'no answer within {GRACE_S:g} s'}")


def _no_more_users(bwrap: str) -> list[str]:
    """The option that forbids further user namespaces, where this bwrap has it (0.8)."""
    said = subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False)
    return ["--disable-userns"] if "--disable-userns" in said.stdout + said.stderr else []


def _file_system(program: Program, files: dict[str, int]) -> list[str]:
    """Arguments for what the program sees."""
    arguments: list[str] = []
    seen, made = ["/usr"], set[str]()
    arguments += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            arguments += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            arguments += ["--ro-bind", name, name]
    for name in _ETC:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for folder in sorted({os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix), sys.prefix}):
        if not any(folder == other or folder.startswith(f"{other}/") for other in seen):
            for parent in reversed(Path(folder).parents):
                # Without this they have the permissions that they have outside, as /root has.
                if str(parent) != "/" and str(parent) not in made:
                    arguments += ["--perms", "0755", "--dir", str(parent)]
                    made.add(str(parent))
            arguments += ["--ro-bind", folder, folder]
            seen.append(folder)
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for folder in first_process.FOLDERS:
        arguments += ["--perms", "1777", "--size", str(program.limits.file_bytes), "--tmpfs", folder]
    for name, number in files.items():
        arguments += ["--perms", "0755", "--file", str(number), f"{first_process.WORK}/{name}"]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def _environment(program: Program) -> list[str]:
    path = os.pathsep.join([f"{sys.prefix}/bin", f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"])
    variables = {
        "PATH": path,
        "HOME": first_process.WORK,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
        # For an interpreter that starts without `site`, which can take longer than the program.
        "PYTHONPATH": sysconfig.get_path("purelib"),
        **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")},
        **program.env_vars,
    }
    return [word for name, value in variables.items() for word in ("--setenv", name, value)]


def _interpreter() -> str:
    """The interpreter itself, not the link of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _numbers(limits: ProgramLimits) -> tuple[int, ...]:
    wall_ms = max(1, int(1000 * limits.wall_s))
    return (wall_ms, limits.memory_bytes, limits.processes, limits.file_bytes, limits.files)


_TRIAL = Program(command=("python", "-I", "-S", "-c", "print('up')"), limits=ProgramLimits(wall_s=60.0))
