"""Two hosts on one machine: network namespaces with addresses of their own, and a Ray cluster over both.

Needs root and the program `ip`. Each has shared memory of its own, the second its own processes too: no process of
the first can map what one of the second has, as on another machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PORT = 6390
_ATTEMPTS = 3
_APART = ("unshare", "--mount-proc", "--pid", "--fork", "--kill-child")


def why_not() -> str | None:
    """Why there can be no two hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program `ip` is missing (package iproute2)"
    made = subprocess.run(["ip", "netns", "add", f"rlhf{os.getpid()}t"], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"rlhf{os.getpid()}t"], check=True)
    return None


@dataclass
class Host:
    """One of the two."""

    namespace: str
    address: str
    device: str
    env: dict[str, str] = field(default_factory=dict)
    _begun: subprocess.Popen[bytes] | None = None

    def command(self, *arguments: str) -> list[str]:
        """A command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def run(self, *arguments: str) -> None:
        done = subprocess.run(
            self.command(*arguments), env=os.environ | self.env, capture_output=True, text=True, timeout=240
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")

    def begin(self, *arguments: str, log: Path, sign: str) -> None:
        """Start what goes on until this host is killed; returns once its output, in `log`, has the sign."""
        command = self.command(*arguments)
        with log.open("w") as output:
            self._begun = subprocess.Popen(command, env=os.environ | self.env, stdout=output, stderr=output)
        end = time.monotonic() + 240
        while sign not in log.read_text():
            if self._begun.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{' '.join(arguments)}: {log.read_text()[-4000:]}")
            time.sleep(0.1)

    def processes(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self) -> None:
        """End everything on this host at once, as a power cut does."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._begun is not None:
            self._begun.wait()

    def cut_off(self) -> None:
        """Take this host's wire away; its processes live on."""
        self.run("ip", "link", "set", self.device, "down")

    def workers(self, word: str) -> list[int]:
        """Ray's workers on this host that have this word in their title."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                if title.startswith("ray::") and word in title:
                    found.append(pid)
        return found


@contextlib.contextmanager
def two_hosts(folder: Path, env: dict[str, str], cpus: tuple[int, int]) -> Iterator[tuple[Host, Host]]:
    """The two hosts, up, with Ray's head on the first; everything on them is ended when the block ends.

    Args:
        folder: for Ray's files; a short path.
        env: of Ray's processes.
        cpus: that each host offers.
    """
    name = f"rlhf{os.getpid()}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env = {**env, **token, "RAY_USAGE_STATS_ENABLED": "0"}
    hosts = [
        Host(f"{name}{end}", f"10.77.0.{number}", f"v{name}{end}", env) for number, end in ((1, "a"), (2, "b"))
    ]
    first, second = hosts
    ray = str(Path(sys.executable).with_name("ray"))

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
        ip("link", "add", first.device, "type", "veth", "peer", "name", second.device)
        for host in hosts:
            ip("link", "set", host.device, "netns", host.namespace)
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", host.device)
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "link", "set", host.device, "up")
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        for host, count, role in ((first, cpus[0], head), (second, cpus[1], [f"--address={first.address}:{PORT}"])):
            start = [ray, "start", *role, f"--node-ip-address={host.address}", f"--num-cpus={count}"]
            start += [f"--temp-dir={folder}/{host.namespace[-1]}", "--object-store-memory=100000000"]
            own_memory = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
            for attempt in range(_ATTEMPTS):
                try:
                    if host is first:
                        host.run("unshare", "--mount", "sh", "-c", own_memory, "sh", *start)
                    else:  # its first process must live on, or all others end with it
                        arguments = [*_APART, "sh", "-c", own_memory, "sh", *start, "--block"]
                        host.begin(*arguments, log=folder / "second.log", sign="Ray runtime started")
                    break
                except RuntimeError as error:
                    # Ray gives its own processes half a minute, which on a busy machine is too little.
                    if "timed out during startup" not in str(error) or attempt == _ATTEMPTS - 1:
                        raise
                    host.kill()
        yield first, second
    finally:
        for host in hosts:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
