"""The attacks on a sandbox and on the reward that uses it, their ground, and what they came to."""

from __future__ import annotations

import asyncio
import contextlib
import json.decoder
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core import ProgramLimits, Sandbox, Trajectory

from rlhf_rollout.rewards.kinds.code import CodeReward, CodeRewardConfig
from rlhf_rollout.testing import escapes, exhaustion, forged_verdicts

Form = Literal["calls", "source", "texts"]
"""Of the tests: an assert that is a call, Python that must run, a text that must be printed."""

LIMITS = ProgramLimits(
    wall_s=4.0, memory_bytes=160 << 20, output_bytes=1 << 18, processes=16, file_bytes=16 << 20, files=500
)
"""Of every attack."""

MOST_S = 60.0
"""Seconds within which an attack must be over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """A program that must earn nothing and harm nothing."""

    name: str
    group: str
    code: str
    wanted: Literal["secret", "true"]
    """What `solve` must return, or print, to earn something: a secret, or that it was successful."""
    form: Form

    @property
    def id(self) -> str:
        """For tests and tables."""
        return f"{self.group}: {self.name}" + (f" ({self.form})" if self.form != "calls" else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttackResult:
    """What an attack came to."""

    score: float
    harm: tuple[str, ...]
    """What is no longer as it was."""
    seconds: float

    @property
    def repelled(self) -> bool:
        """Whether it earned nothing, harmed nothing, and was over in time."""
        return self.score == 0 and not self.harm and self.seconds < MOST_S


def attacks() -> list[Attack]:
    """Every attack; those on the verdict once for each form of tests."""
    found: list[Attack] = []
    for group, module in (("verdict", forged_verdicts), ("escape", escapes), ("resources", exhaustion)):
        for section in module.PROGRAMS.split("\n## ")[1:]:
            title, _, code = section.partition("\n")
            marked = title.endswith(" (true)") or group == "resources"
            name = title.removesuffix(" (true)")
            forms: tuple[Form, ...] = ("calls", "source", "texts") if group == "verdict" else ("calls",)
            for form in forms:
                wanted = "true" if marked else "secret"
                found.append(Attack(name=name, group=group, code=code, wanted=wanted, form=form))
    return found


SHORT = frozenset(
    {
        *(
            "always equal str",
            "exit in the call",
            "verdict on every descriptor",
            "frames above",
            "questions to the tests",
        ),
        *(
            "file of the user",
            "FIFO for the grader",
            "write byte code of a library",
            "TCP to loopback",
            "Unix socket",
        ),
        *(
            "environment",
            "kill a process of the user",
            "a daemon that hides",
            "forks",
            "memory of several processes",
        ),
    }
)
"""Names of the attacks that tests try every time."""


class AttackGround:
    """What attacks go for, around this process: a file, sockets, a variable, a process. Use in `with`."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self.mark = f"attack-{secrets.token_hex(8)}"
        self.sleep = f"{80000 + secrets.randbelow(9999)}.{secrets.randbelow(10**9):09d}"
        self.folder = Path(tempfile.mkdtemp(prefix="attacks-"))
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> AttackGround:
        """Lay it out."""
        self.folder.chmod(0o777)
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        (self.folder / "secret").write_text(self.secret)
        self.canary = self.folder / "canary"
        self.canary.write_text("unchanged")
        self.canary.chmod(0o666)
        os.environ["RLHF_ATTACK_SECRET"] = self.secret
        self._stack.callback(os.environ.pop, "RLHF_ATTACK_SECRET", None)
        self._victim = subprocess.Popen(["sleep", "3600"], env={})
        self._stack.callback(self._end_victim)
        tcp = socket.create_server(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        self.visitors = 0
        for path in (str(self.folder / "socket"), f"\0{self.mark}"):
            one = socket.socket(socket.AF_UNIX)
            one.bind(path)
            one.listen()
            self._serve(one)
        (self.folder / "socket").chmod(0o777)
        self._serve(tcp)
        self._byte_code = _content(json.decoder.__cached__)
        return self

    def __exit__(self, *unused: Any) -> None:
        """Take it away."""
        self._stack.close()

    def fill(self, text: str, limits: ProgramLimits) -> str:
        """A program's text with the names of what is here."""
        words = {
            "SECRET_HEAD": self.secret[:8],
            "SECRET": self.secret,
            "FOLDER": self.folder,
            "CANARY": self.canary,
            "MARK": self.mark,
            "SLEEP": self.sleep,
            "PORT": self.port,
            "VICTIM": self._victim.pid,
            "PID": os.getpid(),
            "MEMORY": limits.memory_bytes,
            "FILE_BYTES": limits.file_bytes,
            "FILES": limits.files,
            "PROCESSES": limits.processes,
        }
        for name, value in words.items():
            text = text.replace(f"@{name}@", str(value))
        return text

    def harm(self) -> Iterator[str]:
        """What is no longer as it was."""
        if self._victim.poll() is not None:
            yield "a process of the user was killed"
            self._victim = subprocess.Popen(["sleep", "3600"], env={})
        if not self.canary.exists() or self.canary.read_text() != "unchanged":
            yield "a file of the user was changed"
            self.canary.write_text("unchanged")
        if not (self.folder / "secret").exists() or list(self.folder.glob("*.pickle")):
            yield "the folder of the user was changed"
        if self.visitors:
            yield "a socket was reached"
            self.visitors = 0
        if _content(json.decoder.__cached__) != self._byte_code:
            yield "byte code of a library was changed"
        for folder in {sysconfig.get_path("purelib"), "/usr/bin", "/usr/lib", "/etc", "/", "/usr", *sys.path}:
            if list(Path(folder or ".").glob(f"{self.mark}*")):
                yield f"{folder} was written to"
        if alive := _processes_with(self.sleep.encode()):
            yield f"processes are left: {alive}"
            for number in alive:
                with contextlib.suppress(OSError):
                    os.kill(number, 9)

    def _serve(self, listener: socket.socket) -> None:
        self._stack.callback(listener.close)

        def answer() -> None:
            while True:
                try:
                    visitor, _ = listener.accept()
                except OSError:
                    return
                self.visitors += 1
                with contextlib.suppress(OSError), visitor:
                    visitor.sendall(self.secret.encode())

        threading.Thread(target=answer, daemon=True).start()

    def _end_victim(self) -> None:
        self._victim.kill()
        self._victim.wait()


def try_attack(attack: Attack, sandbox: Sandbox, ground: AttackGround) -> AttackResult:
    """Run an attack through a code reward on a sandbox."""
    before = set(_temporary_files())
    config = CodeRewardConfig(limits=LIMITS, sandbox="none", partial=attack.wanted == "secret")
    reward = CodeReward(config, name="attack", sandbox=sandbox)
    code = ground.fill(attack.code, LIMITS)
    value = ground.secret if attack.wanted == "secret" else True
    tests: Any = {
        "calls": f"assert solve() == {value!r}",
        "source": f"wanted = {value!r}\nassert solve() == wanted\nassert len(solve()) == 32 and solve() == wanted",
        "texts": [{"input": "the secret?\n", "output": str(value)}],
    }[attack.form]
    text = f"```python\n{code}\n" + ("print(solve())\n" if attack.form == "texts" else "") + "```"
    sample = Trajectory(
        sample_id="attack",
        group_id="attack",
        token_ids=(0, 1),
        response_mask=(False, True),
        rollout_log_probs=(0.0, 0.0),
        weight_versions=(-1, 0),
        metadata={"tests": tests},
    )
    began = time.monotonic()
    try:
        (score,) = asyncio.run(reward.score([sample], [text]))
    finally:
        reward.close()
    seconds = time.monotonic() - began
    harm = [*ground.harm()]
    if left := [name for name in _temporary_files() if name not in before and name.startswith("program-")]:
        harm.append(f"files are left in the temporary folder: {left}")
    return AttackResult(score=score.value, harm=tuple(harm), seconds=seconds)


def _temporary_files() -> list[str]:
    return os.listdir(tempfile.gettempdir())


def _content(path: str | None) -> bytes:
    with contextlib.suppress(OSError, TypeError):
        return Path(str(path)).read_bytes()
    return b""


def _processes_with(word: bytes) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if word in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                found.append(int(name))
    return found
