"""The first process of a sandbox: starts the program, holds its bounds, and takes everything along when it ends.

Its text is run by a bare interpreter (`python -I -S -c`) as process 1 of a PID namespace, so that the kernel kills
whatever is left when it ends. The program cannot end it, stop it, trace it, or read its memory. It imports little,
for every program waits for it.
"""

from __future__ import annotations

import os
import resource
import sys
import time

WORK = "/program"
FOLDERS = (WORK, "/tmp", "/dev/shm")
TICK_S = 0.02
HIDDEN_S = 0.2
"""Seconds for which a process may keep others from looking into it, as one does that begins a program."""
_SET_DEATH_SIGNAL, _SET_DUMPABLE = 1, 4
_SIGCHLD, _SIGINT, _SIGKILL, _SIGPIPE, _SIGXFSZ = 17, 2, 9, 13, 25


def prctl(option: int, value: int) -> None:
    """Call `prctl`, without the tens of milliseconds that importing ctypes can take."""
    import _ctypes  # pyright: ignore[reportMissingImports]

    address = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # pyright: ignore[reportArgumentType]
    if _ctypes.call_function(address, (option, value, 0, 0, 0)) != 0:
        raise OSError(f"prctl({option}, {value}) failed")


def main() -> None:
    """Arguments: pipe for the outcome, user to become (0: stay), five limits, and the command."""
    import _signal  # pyright: ignore[reportMissingImports]

    outcome, user, *numbers = (int(word) for word in sys.argv[1:8])
    limits: dict[str, int] = dict(
        zip(("wall_ms", "memory", "processes", "file_bytes", "files"), numbers, strict=True)
    )
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # Set again, for becoming another user has unset both.
    prctl(_SET_DEATH_SIGNAL, _SIGKILL)
    prctl(_SET_DUMPABLE, 1)
    _signal.signal(_SIGINT, _signal.SIG_IGN)
    _signal.pthread_sigmask(_signal.SIG_BLOCK, [_SIGCHLD])
    waiting, going = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(going)
        os.read(waiting, 1)
        os.close(waiting)
        start_program(sys.argv[8:], limits, outcome)
    # The program cannot trace a process that is not dumpable. Its own process is, from the first look on.
    prctl(_SET_DUMPABLE, 0)
    os.close(waiting)
    os.close(going)
    code, limit = watch(child, limits, outcome)
    os.write(outcome, f"{code} {limit}".encode())
    os._exit(0)


def start_program(command: list[str], limits: dict[str, int], outcome: int) -> None:
    """Become the program."""
    import _signal  # pyright: ignore[reportMissingImports]

    try:
        os.close(outcome)
        for number in (_SIGINT, _SIGPIPE, _SIGXFSZ):
            _signal.signal(number, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_SIGCHLD])
        seconds = limits["wall_ms"] // 1000 + 1
        for kind, bound in (
            (resource.RLIMIT_CPU, seconds),
            # Not the address space, of which Node and Java reserve gigabytes that they never use.
            (resource.RLIMIT_DATA, limits["memory"]),
            (resource.RLIMIT_FSIZE, limits["file_bytes"]),
            (resource.RLIMIT_NPROC, limits["processes"]),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 256),
            (resource.RLIMIT_MEMLOCK, 64 << 10),
            (resource.RLIMIT_MSGQUEUE, 64 << 10),
        ):
            resource.setrlimit(kind, (bound, bound))
        os.chdir(WORK)
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode(errors="replace"))
    os._exit(127)


def watch(child: int, limits: dict[str, int], outcome: int) -> tuple[int, str]:
    """Wait for the program; returns its exit code (negative: signal) and the limit that it went over, if any."""
    import _signal  # pyright: ignore[reportMissingImports]
    import select

    listener = select.poll()
    listener.register(outcome, 0)
    deadline = time.monotonic() + limits["wall_ms"] / 1000
    since: dict[str, float] = {}
    tick = TICK_S / 4
    while True:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 0, ""
            if pid == child:
                return os.waitstatus_to_exitcode(status), ""
            if pid == 0:
                break
        left = deadline - time.monotonic()
        if left <= 0:
            return -_SIGKILL, "time"
        if listener.poll(0):  # nobody is there any more who would read the outcome
            os._exit(1)
        memory, tasks, hidden = usage()
        now = time.monotonic()
        since = {name: since.get(name, now) for name in hidden}
        if memory > limits["memory"]:
            return -_SIGKILL, "memory"
        if tasks > limits["processes"] or any(now - first > HIDDEN_S for first in since.values()):
            return -_SIGKILL, "processes"
        if any(files_in(folder) > limits["files"] for folder in FOLDERS):
            return -_SIGKILL, "files"
        _signal.sigtimedwait([_SIGCHLD], min(tick, left))
        tick = min(2 * tick, TICK_S)


def files_in(folder: str) -> int:
    """Number of files, folders and links in one of the program's file systems."""
    state = os.statvfs(folder)
    return state.f_files - state.f_ffree


def usage() -> tuple[int, int, set[str]]:
    """Memory in bytes, tasks, and processes that cannot be looked into, of everything but this process.

    A process that hides its memory, or is in a user namespace of its own, cannot be looked into. One that begins
    a program cannot either, for a moment.
    """
    memory, tasks, hidden = unattached_memory(), 0, set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/status", "rb") as file:
                lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
            if lines[b"State"].split()[0] in (b"Z", b"X"):
                continue
            tasks += int(lines[b"Threads"])
            for part in (b"RssAnon", b"RssShmem", b"VmSwap"):
                memory += 1024 * int(lines.get(part, b"0 kB").split()[0])
            memory += files_in_memory(name)
        except PermissionError:
            hidden.add(name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return memory, tasks, hidden


def files_in_memory(process: str) -> int:
    """Bytes of the memory files (memfd) that a process holds open.

    Raises:
        PermissionError: the process does not let itself be looked into.
    """
    os.readlink(f"/proc/{process}/ns/user")
    found = 0
    for name in os.listdir(f"/proc/{process}/fd"):
        path = f"/proc/{process}/fd/{name}"
        try:
            if os.readlink(path).startswith("/memfd:"):
                found += 512 * os.stat(path).st_blocks
        except FileNotFoundError:
            continue
    return found


def unattached_memory() -> int:
    """Bytes of System V shared memory that no process has attached."""
    try:
        with open("/proc/sysvipc/shm", "rb") as file:
            rows = [line.split() for line in file.read().splitlines()[1:]]
    except FileNotFoundError:
        return 0
    return sum(int(row[14]) for row in rows if row[6] == b"0")


if __name__ == "__main__":
    main()
