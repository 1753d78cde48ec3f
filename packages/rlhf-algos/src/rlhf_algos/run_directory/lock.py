"""One process at a time owns a run's directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from rlhf_core import ConfigError

LOCK = ".lock"

_BEAT_S = 10.0
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""What file systems without locks answer: Lustre and some network mounts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Who holds a lock."""

    pid: int
    host: str
    since: str
    born: int
    """When the process began, in the system's ticks: a number may be given to another process later."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class DirectoryLock:
    """A lock file in a directory; a context manager. It goes with its process, however that ends.

    The kernel's lock (`flock`) decides wherever it is shared by all who see the file. On a network file system it
    may hold for one host alone, or not exist. The file therefore names its owner, who touches it every ten seconds:
    an owner on this host is looked for by its process, one on another host by whether it still touches the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        what: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
        beat_s: float = _BEAT_S,
    ) -> None:
        """Lock by the file `path`.

        Args:
            path: the lock file; its directory is made if it is not there.
            what: what is locked, for messages; the file's directory if not given.
            say: told when the lock of a dead process is taken over.
            beat_s: how often the owner touches the file.
        """
        self.path = path
        self._what = str(what or path.parent)
        self._say, self._beat_s = say, beat_s
        self._file: int | None = None
        self._closed = threading.Event()

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: another process has it; names the process.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take(file)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        threading.Thread(target=self._beat, name=f"lock {self.path}", daemon=True).start()

    def _take(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(_read(file)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        before = _read(file)
        if before is not None:
            if self._alive(before, file):
                raise self._refusal(before)
            self._say(f"{self._what!r} was left by {before}, which has ended; it is taken over")
        _write(file, json.dumps(asdict(_own())))

    def _alive(self, owner: Owner, file: int) -> bool:
        """Whether the owner that a lock file names still works."""
        if owner.host == socket.gethostname():
            return owner.born == _born(owner.pid)
        self._say(f"{self._what!r} belongs to {owner}; looking whether that still works")
        touched = os.fstat(file).st_mtime_ns
        for _ in range(4):
            time.sleep(self._beat_s)
            os.close(os.open(self.path, os.O_RDONLY))  # a network file system looks anew at a file that is opened
            if os.stat(self.path).st_mtime_ns != touched:
                return True
        return False

    def _refusal(self, owner: Owner | None) -> ConfigError:
        who = str(owner) if owner is not None else "another process"
        return ConfigError(
            f"{self._what!r} is in use by {who}; wait for its end or stop it, or give another output"
        )

    def _beat(self) -> None:
        while not self._closed.wait(self._beat_s):
            try:
                os.utime(self.path)
            except OSError:  # the folder was moved or its disk is gone: the run itself will hear of it
                continue

    def release(self) -> None:
        """Give the lock back; may be called twice."""
        self._closed.set()
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None

    def __enter__(self) -> DirectoryLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _own() -> Owner:
    pid = os.getpid()
    return Owner(pid=pid, host=socket.gethostname(), since=time.strftime("%Y-%m-%d %H:%M:%S"), born=_born(pid) or 0)


def _born(pid: int) -> int | None:
    """When a process of this host began, in ticks; None if there is none of this number that still runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _read(file: int) -> Owner | None:
    try:
        return Owner(**json.loads(os.pread(file, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)
    os.fsync(file)
