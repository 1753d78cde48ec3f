"""A command with everything that it starts: found by marker, session and parents, never by name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.warm import WarmStarter

MARK = "RLHF_CHAOS_MARK"

Alive = frozenset[tuple[int, int]]
"""Processes by number and by when they began, in the system's ticks: a number may be another process's later."""


@dataclass(frozen=True, slots=True)
class _Process:
    born: int
    parent: int
    session: int
    ended: bool


@dataclass(slots=True)
class Family:
    """A command in a session of its own, and whatever came of it, also after its parents have died."""

    arguments: Sequence[str]
    """Of `phases.py`."""
    mark: str
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    starter: WarmStarter | None = None
    """Starts it in a moment; None starts a Python of its own."""
    root: Any = None
    """The process of the command: a `Popen`, or what is like one."""
    known: set[tuple[int, int]] = field(default_factory=set)
    """Every process that was ever seen."""

    def start(self) -> None:
        """Start the command; its output goes to `log`."""
        env = os.environ | self.env | {MARK: self.mark}
        if self.starter is not None:
            self.root = self.starter.start(self.arguments, log=self.log, env=env)
            return
        command = [sys.executable, str(Path(__file__).parent / "phases.py"), *self.arguments]
        with self.log.open("ab") as output:
            self.root = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)

    def members(self) -> Alive:
        """The processes that are alive now."""
        table = _processes()
        assert self.root is not None
        ours = {pid for pid, born in self.known if pid in table and table[pid].born == born}
        ours |= {pid for pid in table if table[pid].session == self.root.pid or _marked(pid, self.mark)}
        grew = True
        while grew:
            more = {pid for pid, one in table.items() if one.parent in ours and pid not in ours}
            ours |= more
            grew = bool(more)
        self.known |= {(pid, table[pid].born) for pid in ours}
        return frozenset((pid, table[pid].born) for pid in ours if not table[pid].ended)

    def kill(self) -> None:
        """End every one of them by SIGKILL."""
        until = time.monotonic() + 30
        while (alive := self.members()) and time.monotonic() < until:
            for pid, _ in alive:
                _send(pid, signal.SIGKILL)
            time.sleep(0.02)
        if self.root is not None:
            self.root.wait(timeout=30)

    def kill_root(self) -> None:
        """End the process of the command itself by SIGKILL, and nothing else."""
        self.members()
        self.send(signal.SIGKILL)
        assert self.root is not None
        self.root.wait(timeout=30)

    def send(self, number: int) -> None:
        """Send a signal to the process of the command."""
        assert self.root is not None
        _send(self.root.pid, number)

    def seconds_until_gone(self, *, limit_s: float) -> tuple[float, list[str]]:
        """How long the others live on, and what is left at the limit."""
        begin = time.monotonic()
        while (alive := self.members()) and time.monotonic() - begin < limit_s:
            time.sleep(0.1)
        return time.monotonic() - begin, sorted(_what(pid) for pid, _ in alive)


def _processes() -> dict[int, _Process]:
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(entry.name)] = _Process(
            born=int(fields[19]), parent=int(fields[1]), session=int(fields[3]), ended=fields[0] in "ZX"
        )
    return found


def _marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _what(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return "ended"
    return " ".join(Path(word).name for word in words[:3] if not word.startswith("-"))[:60] or str(pid)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
