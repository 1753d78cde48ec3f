"""A process of ours that runs people's Python: messages with deadlines, and its end with all that it started.

Messages are pickles with their length in front. Both ends are the same user's processes on one machine.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from typing import Any, BinaryIO

from rlhf_rollout.sandbox.lifetime import in_own_process_namespace

_LENGTH = struct.Struct(">Q")


class WorkerGone(Exception):
    """The worker was killed or died."""

    def __init__(self, how: str, *, late: bool) -> None:
        super().__init__(how)
        self.how = how
        """What happened, as the end of a sentence about the worker's work."""
        self.late = late
        """Whether it was killed at a deadline."""


class WorkerProcess:
    """A process and its two pipes. It runs `main` of a module, which begins with `take_pipes`."""

    def __init__(self, module: str) -> None:
        # A session of its own, so that killing it kills what the function has started too.
        self._process = subprocess.Popen(
            in_own_process_namespace([sys.executable, "-c", f"from {module} import main; main()"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def call(self, message: object, timeout_s: float) -> Any:
        """Send and wait for the answer; at the deadline the process is killed, which ends the wait.

        Raises:
            WorkerGone: there is no answer, and the process has ended.
        """
        late = threading.Event()

        def cut() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(timeout_s, cut)
        timer.daemon = True
        timer.start()
        try:
            write_message(self._process.stdin, message)  # type: ignore[arg-type]
            return read_message(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, ValueError):  # of a pipe that is closed, too
            self.kill()
            code = self._process.wait()
            code = 128 - code if code > 128 else code  # as shells, and bwrap, pass a signal on
            how = f"did not return within {timeout_s:g} s" if late.is_set() else f"lost its process (exit {code})"
            raise WorkerGone(how, late=late.is_set()) from None
        finally:
            timer.cancel()

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def write_message(pipe: BinaryIO, message: object) -> None:
    """Send an object."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_message(pipe: BinaryIO) -> Any:
    """The next object.

    Raises:
        EOFError: the other end is gone.
    """
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (size,) = _LENGTH.unpack(head)
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """In the worker: the pipes of its messages, which nothing else in the process can touch from now on.

    What is printed goes to standard error; who reads standard input reads nothing.
    """
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    return source, target
