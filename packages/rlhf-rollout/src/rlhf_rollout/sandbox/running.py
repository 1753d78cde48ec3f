"""Programs as processes of this machine: their pipes are read with bounds, their end has a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from rlhf_core import Program, ProgramLimit, ProgramOutcome

GRACE_S = 10.0
"""Seconds beyond a program's own that starting and ending it may take."""

_CHUNK = 1 << 16


@dataclass(kw_only=True, slots=True)
class RunningProgram(ABC):
    """A program that was started. What it writes is kept here."""

    program: Program
    process: subprocess.Popen[bytes]
    """The process that stands for it here."""
    written: dict[int, bytearray] = field(default_factory=dict)
    """What came out of each pipe so far, by descriptor."""

    def time_left(self) -> float:
        """Seconds until this side stops it, for programs whose own side does not hold the time."""
        return float("inf")

    @abstractmethod
    def kill(self) -> None:
        """End the program with everything that it started, and wait until it is gone. May be called twice."""

    @abstractmethod
    def ended(self) -> tuple[int, ProgramLimit]:
        """Exit code and limit, once its pipes are closed.

        Raises:
            SandboxError: the program was not run.
        """


class LocalPrograms(ABC):
    """`run` and `run_linked` of providers whose programs are processes of this machine."""

    @abstractmethod
    def start(self, program: Program, *, stdin: int, stdout: int) -> RunningProgram:
        """Start a program on two descriptors, which stay the caller's; standard error becomes a pipe.

        Raises:
            SandboxError: it cannot be started.
        """

    def run(self, program: Program) -> ProgramOutcome:
        """See Sandbox."""
        with contextlib.ExitStack() as stack:
            (read_in, write_in), (read_out, write_out) = pipe(stack), pipe(stack)
            running = self.start(program, stdin=read_in.number, stdout=write_out.number)
            stack.callback(_release, running)
            read_in.close()
            write_out.close()
            limit = pump([running], write_in, read_out)
            return outcome_of(running, limit, stdout=bytes(running.written.get(read_out.number, b"")))

    def run_linked(self, first: Program, second: Program) -> tuple[ProgramOutcome, ProgramOutcome]:
        """See Sandbox."""
        with contextlib.ExitStack() as stack:
            (there_out, there_in), (back_out, back_in) = pipe(stack), pipe(stack)
            two = self.start(second, stdin=there_out.number, stdout=back_in.number)
            stack.callback(_release, two)
            one = self.start(first, stdin=back_out.number, stdout=there_in.number)
            stack.callback(_release, one)
            for end in (there_out, there_in, back_out, back_in):
                end.close()
            limit = pump([one, two], None, None)
            before_kill = two.process.poll() is not None
            two.kill()
            other = outcome_of(two, "") if before_kill else ProgramOutcome(exit_code=-9, stderr=_errors(two))
            return outcome_of(one, limit), other


@dataclass(slots=True)
class PipeEnd:
    """One end of a pipe, closed once."""

    number: int
    open: bool = True

    def close(self) -> None:
        """Close it, unless it is closed."""
        if self.open:
            self.open = False
            os.close(self.number)


def pipe(stack: contextlib.ExitStack) -> tuple[PipeEnd, PipeEnd]:
    """A pipe's ends, for reading and for writing, which the stack closes."""
    ends = tuple(map(PipeEnd, os.pipe()))
    for end in ends:
        stack.callback(end.close)
    return ends[0], ends[1]


def _release(running: RunningProgram) -> None:
    running.kill()
    if running.process.stderr is not None:
        running.process.stderr.close()


def _errors(running: RunningProgram) -> bytes:
    assert running.process.stderr is not None  # noqa: S101
    return bytes(running.written.get(running.process.stderr.fileno(), b""))


def outcome_of(running: RunningProgram, limit: ProgramLimit, *, stdout: bytes = b"") -> ProgramOutcome:
    """How a program ended that is to be gone; `limit` is what this side stopped it for.

    Raises:
        SandboxError: it was not run.
    """
    running.kill()
    if limit:
        return ProgramOutcome(exit_code=-9, stdout=stdout, stderr=_errors(running), limit=limit)
    code, limit = running.ended()
    return ProgramOutcome(exit_code=code, stdout=stdout, stderr=_errors(running), limit=limit)


def pump(programs: list[RunningProgram], stdin: PipeEnd | None, stdout: PipeEnd | None) -> ProgramLimit:
    """Move what programs read and write until the first has ended; returns a limit that it went over.

    Args:
        programs: one, or two that are linked. Their standard errors are read to their bound, and on for nothing.
        stdin: where to write the input of the first.
        stdout: where its output comes.
    """
    first = programs[0]
    deadline = time.monotonic() + max(p.program.limits.wall_s for p in programs) + GRACE_S
    watched = select.poll()
    bounds: dict[int, tuple[RunningProgram, int]] = {}
    for running in programs:
        assert running.process.stderr is not None  # noqa: S101
        bounds[running.process.stderr.fileno()] = (running, running.program.limits.output_bytes)
    if stdout is not None:
        bounds[stdout.number] = (first, first.program.limits.output_bytes)
    for number in bounds:
        os.set_blocking(number, False)
        watched.register(number, select.POLLIN)
    given = memoryview(first.program.stdin) if stdin is not None else memoryview(b"")
    if stdin is not None:
        os.set_blocking(stdin.number, False)
        watched.register(stdin.number, select.POLLOUT)
    awaited = {number for number, (running, _) in bounds.items() if running is first}
    while awaited:
        left = min(deadline - time.monotonic(), first.time_left())
        if left <= 0:
            return "time"
        for number, event in watched.poll(1000 * min(left, 1.0)):
            if stdin is not None and number == stdin.number:
                given = _feed(stdin, given)
                if not stdin.open:
                    watched.unregister(number)
            elif event and not _read(number, bounds[number], stop=stdout is not None and number == stdout.number):
                watched.unregister(number)
                awaited.discard(number)
            if stdout is not None and len(first.written.get(stdout.number, b"")) >= bounds[stdout.number][1]:
                return "output"
    return ""


def _feed(stdin: PipeEnd, given: memoryview) -> memoryview:
    """Write what fits; closes the pipe when all is written or nobody reads."""
    try:
        given = given[os.write(stdin.number, given[:_CHUNK]) :] if given else given
    except BlockingIOError:
        return given
    except BrokenPipeError:
        given = memoryview(b"")
    if not given:
        stdin.close()
    return given


def _read(number: int, bound: tuple[RunningProgram, int], *, stop: bool) -> bool:
    """Keep what came, up to the bound; False where the pipe has ended."""
    running, most = bound
    try:
        data = os.read(number, _CHUNK)
    except BlockingIOError:
        return True
    kept = running.written.setdefault(number, bytearray())
    kept += data[: max(0, most - len(kept))]
    return bool(data)
