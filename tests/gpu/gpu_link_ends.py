"""The two ends of a weight link, each in a process of its own, for the checks of links.

python gpu_link_ends.py killed KIND      # a receiver dies in mid-sync; prints what became of the trainer
python gpu_link_ends.py speed KIND       # prints GB/s
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch
from rlhf_core import (
    DeadlineExceeded,
    Link,
    WeightSyncError,
    join_link,
    open_sender,
    receive_weights,
    send_weights,
)
from rlhf_core.testing.transport import Source

ENDS = {
    "nccl": ("cuda:0", "cuda:1"),
    "ipc": ("cuda:0", "cuda:0"),
    "gloo": ("cpu", "cpu"),
    "shm": ("cpu", "cpu"),
}
"""Devices of the sender and of the receiver."""
SMALL, LARGE = [1 << 20] * 6, [64 << 20] * 8
"""Elements of the tensors, in float32."""
BUCKET = {"killed": 1 << 22, "speed": 1 << 28}
SIZES = {"killed": SMALL, "speed": LARGE}
TIMEOUT_S = {"killed": 20.0, "speed": 120.0}


def receiver(what: str, kind: str, address: str, die_after: int) -> None:
    """Take versions until the link ends; with `die_after` be killed amid that bucket."""
    device = ENDS[kind][1]
    end = join_link(Link(kind=kind, address=address, receivers=1, timeout_s=TIMEOUT_S[what]), 0, device=device)
    buckets = 0

    def load(pairs: Any) -> None:
        nonlocal buckets
        found = list(pairs)
        buckets += bool(found)
        if buckets == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "killed":
            assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in found), "wrong values"

    for version in (1, 2):
        expected = Source(SIZES[what], version, device)
        print("ready", version, flush=True)
        receive_weights(expected.manifest(bucket_bytes=BUCKET[what]), end, load)
        print("took", version, flush=True)
    end.close()


class Linked:
    """A sender, and its receiver in another process."""

    def __init__(self, what: str, kind: str, *, die_after: int = 0) -> None:
        self._what = what
        self.sender = open_sender(kind, receivers=1, device=ENDS[kind][0], timeout_s=TIMEOUT_S[what])
        given = [what, kind, self.sender.link.address, str(die_after)]
        command = [sys.executable, __file__, "receiver", *given]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.sender.accept()

    def send(self, source: Source) -> Any:
        """One sync, begun when the receiver is ready for it."""
        assert self.process.stdout is not None
        next(line for line in self.process.stdout if line.startswith("ready"))
        return send_weights(source, source.manifest(bucket_bytes=BUCKET[self._what]), self.sender)

    def close(self) -> int:
        """The receiver's exit status."""
        self.sender.close()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


def killed(kind: str) -> dict[str, Any]:
    """Sync once, lose the receiver amid the second sync, and sync twice with a new one."""
    device = ENDS[kind][0]
    first, second = (Source(SMALL, version, device) for version in (1, 2))
    linked = Linked("killed", kind, die_after=len(SMALL) + 2)
    linked.send(first)
    started = time.monotonic()
    try:
        linked.send(second)
        error = "none"
    except (WeightSyncError, DeadlineExceeded) as raised:
        error = type(raised).__name__
    noticed = time.monotonic() - started
    status = linked.close()
    alive = float(torch.ones(8, device=device).sum()) == 8.0
    fresh = Linked("killed", kind)
    for source in (first, second):
        fresh.send(source)
    return {
        "error": error,
        "noticed_s": noticed,
        "killed": status == -signal.SIGKILL,
        "alive": alive,
        "next_status": fresh.close(),
    }


def speed(kind: str) -> dict[str, Any]:
    """GB/s of the second sync over a link."""
    linked = Linked("speed", kind)
    reports = [linked.send(Source(LARGE, version, ENDS[kind][0])) for version in (1, 2)]
    return {"gb_per_s": reports[1].bytes / 1e9 / reports[1].seconds, "status": linked.close()}


def main() -> None:
    """Be one of the ends."""
    what, *given = sys.argv[1:]
    if what == "receiver":
        receiver(given[0], given[1], given[2], int(given[3]))
    else:
        print("result", json.dumps({"killed": killed, "speed": speed}[what](*given)), flush=True)


if __name__ == "__main__":
    main()
