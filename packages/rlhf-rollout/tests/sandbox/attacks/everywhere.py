"""Every attack as every user that can be had here: root and nobody, with and without user namespaces.

    python packages/rlhf-rollout/tests/sandbox/attacks/everywhere.py    # more than one row needs root

Prints what was not repelled, and the rows of the table in docs/sandbox.md.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
_NEW_USER = 0x10000000
TABLE = [sys.executable, "-m", "rlhf_rollout.testing.attack_table"]


def without_user_namespaces(command: list[str]) -> list[str]:
    """A command as root of a user namespace that holds every user and may have no namespaces of users below it."""
    return [sys.executable, __file__, "--bounded", *command]


def as_nobody(command: list[str]) -> list[str]:
    """A command as an ordinary user, who can also read an interpreter that lies in root's home."""
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]
    home = Path("/root")
    if not Path(os.path.realpath(sys.executable)).is_relative_to(home):
        return drop
    base = str(Path(os.path.realpath(sys.executable)).parents[1])
    view = ["bwrap", "--dev-bind", "/", "/", "--perms", "0755", "--tmpfs", str(home)]
    for parent in reversed(Path(base).parents):
        if parent.is_relative_to(home) and parent != home:
            view += ["--perms", "0755", "--dir", str(parent)]
    return [*view, "--ro-bind", base, base, "--", *drop]


def bounded(command: list[str]) -> None:
    """Become the command, in a user namespace without room for others."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        if ctypes.CDLL(None).unshare(_NEW_USER) != 0:
            os._exit(1)
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os.setgid(0)
        os.setuid(0)
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        os.execvp(command[0], command)
    os.read(ready[0], 1)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{child}/{name}").write_text("0 0 4294967295")
    os.write(done[1], b"x")
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def main() -> int:
    """Try all; the exit code is 1 if any attack was not repelled."""
    rows = {"this user": [*TABLE, "bubblewrap"]}
    if os.geteuid() == 0:
        rows["root, no user namespaces"] = without_user_namespaces(rows["this user"])
        rows["nobody"] = as_nobody(rows["this user"])
        rows["nobody, no user namespaces"] = without_user_namespaces(as_nobody(rows["this user"]))
    codes = []
    for name, command in rows.items():
        print(f"-- {name}", flush=True)
        environment = {**os.environ, "HOME": "/tmp", "USER": "", "LOGNAME": name.split(",")[0]}
        codes.append(subprocess.run([*command, *sys.argv[1:]], env=environment, check=False).returncode)
    return int(any(codes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bounded"]:
        bounded(sys.argv[2:])
    sys.exit(main())
