"""Seconds to close many workers of which none comes to its close: processes that are busy, and have to be killed.

    python benchmarks/shutdown.py --workers 64

Prints the time against the bound, which is one deadline for all of them, and against closing them one by one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import Future
from typing import Any

from rlhf_launch import Pulse, close_workers

BUSY = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('busy', flush=True)\ntime.sleep(1e6)"
)


class BusyProcess:
    """A handle of a process that answers nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)

    def await_busy(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return Future()

    def pulse(self) -> Future[Pulse]:
        return Future()

    def begin_close(self) -> Future[Any]:
        return Future()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--deadline", type=float, default=15.0, help="seconds that all workers have together")
    arguments = parser.parse_args()
    workers = [BusyProcess(f"rank-{index}") for index in range(arguments.workers)]
    for worker in workers:
        worker.await_busy()
    begin = time.perf_counter()
    close_workers(workers, timeout_s=arguments.deadline)
    seconds = time.perf_counter() - begin
    left = sum(worker.alive for worker in workers)
    one_by_one = arguments.deadline * arguments.workers
    print(
        f"{arguments.workers} busy workers: closed in {seconds:.1f} s, {left} left; the deadline is "
        f"{arguments.deadline:g} s ({seconds / arguments.deadline:.2f}x), one by one would be {one_by_one:.0f} s "
        f"({one_by_one / seconds:.0f}x)"
    )


if __name__ == "__main__":
    main()
