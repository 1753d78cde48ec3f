"""The sandbox seam: a program that nobody trusts in, what it wrote and how it ended out.

A sandbox gives a program a file system of its own that it cannot change but for a work folder, no environment but
what it is given, no network and no socket, and bounds for it and all that it starts together. When a call returns,
every process that the program started has ended, and nothing that it wrote is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from rlhf_core.errors import ConfigError

ProgramLimit = Literal["", "time", "memory", "processes", "output", "files"]
"""The bound at which a program was stopped; empty where it ended by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """What a program and all that it starts may use together."""

    wall_s: float = 10.0
    """Seconds until everything is killed. Each process has as much processor time."""
    memory_bytes: int = 512 << 20
    """Memory of all its processes, and the data of each."""
    output_bytes: int = 1 << 20
    """Standard output, at which it is stopped, and standard error, of which the rest is thrown away."""
    processes: int = 32
    """Processes and threads at the same time."""
    file_bytes: int = 64 << 20
    """Space for the files that it writes, in each of its folders."""
    files: int = 4096
    """Number of files, folders and links that it makes."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "memory_bytes", "output_bytes", "processes", "file_bytes", "files"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"program limits: {name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What is run.

    >>> Program(command=("python", "main.py"), files={"main.py": b"print(input()[::-1])"}, stdin=b"abc").stdin
    b'abc'
    """

    command: tuple[str, ...]
    """The executable and its arguments, started in the work folder. `python` is Python 3.11 or later."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the work folder by name, without folders; they can be executed."""
    stdin: bytes = b""
    """Standard input; not used where programs are linked."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides `PATH`, `HOME` and those that keep numerical libraries to one thread."""
    limits: ProgramLimits = field(default_factory=ProgramLimits)

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("a program needs a command, for instance ('python', 'main.py')")
        for name in self.files:
            if not name or name in (".", "..") or "/" in name or "\0" in name:
                raise ConfigError(f"a program's file needs a plain name, got {name!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOutcome:
    """How a program ended and what it wrote."""

    exit_code: int
    """Negative: the signal that ended it."""
    stdout: bytes = b""
    """At most `output_bytes`; empty where programs are linked."""
    stderr: bytes = b""
    """The first `output_bytes`."""
    limit: ProgramLimit = ""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.limit


@runtime_checkable
class Sandbox(Protocol):
    """Runs programs that nobody trusts. Its methods block, and may be called from many threads at once.

    Both raise SandboxError where the sandbox fails for no fault of the program.
    """

    def run(self, program: Program) -> ProgramOutcome:
        """Run a program to its end, or to one of its limits."""
        ...

    def run_linked(self, first: Program, second: Program) -> tuple[ProgramOutcome, ProgramOutcome]:
        """Run two programs, each in a sandbox of its own, that talk to each other.

        The standard output of each is the standard input of the other, and this is all that one can reach of the
        other. The second is killed when the first has ended.
        """
        ...

    def close(self) -> None:
        """Let go of what the sandbox holds. May be called twice."""
        ...
