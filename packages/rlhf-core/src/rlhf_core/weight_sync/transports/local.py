"""Hand-over between threads of one process: receivers see the sender's own memory, nothing is copied."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_core.errors import DeadlineExceeded, WeightSyncError
from rlhf_core.weight_sync.manifest import Bucket
from rlhf_core.weight_sync.transports.transport import Link, Sending


class LocalTransport:
    """See rlhf_core.weight_sync.transports.transport."""

    @staticmethod
    def open(kind: str, *, receivers: int, host: str | None, device: torch.device, timeout_s: float) -> LocalSender:
        """A link that is known by its name in this process."""
        link = Link(kind=kind, address=uuid.uuid4().hex, receivers=receivers, timeout_s=timeout_s)
        return LocalSender(link, device)

    @staticmethod
    def join(link: Link, rank: int, device: torch.device) -> LocalReceiver:
        """Wait until all receivers have joined."""
        meeting = _meetings.get(link.address)
        if meeting is None:
            raise WeightSyncError(
                "no open local weight link of this name in this process; `local` works within one process, "
                "use gloo, shm or nccl between processes"
            )
        meeting.join(rank)
        return LocalReceiver(link, rank, device, meeting.pipes[rank])


@dataclass(eq=False)
class _Handover:
    """A bucket and the receivers that are still to take it."""

    flat: Tensor
    bucket: Bucket
    left: int
    refusal: str | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def taken(self, refusal: str | None = None) -> None:
        with self.changed:
            self.left -= 1
            self.refusal = self.refusal or refusal
            self.changed.notify_all()


class _Meeting:
    """Who has joined, and a pipe to each."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.pipes: list[queue.Queue[_Handover | None]] = [queue.Queue() for _ in range(link.receivers)]
        self.joined: set[int] = set()
        self.changed = threading.Condition()
        self.accepted = False

    def join(self, rank: int) -> None:
        with self.changed:
            self.joined.add(rank)
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: self.accepted, self.link.timeout_s):
                raise DeadlineExceeded(
                    f"waited {self.link.timeout_s:g} s for the sender of a local weight link to accept "
                    f"receiver {rank}"
                )

    def accept(self) -> None:
        with self.changed:
            if self.accepted:
                return
            if not self.changed.wait_for(lambda: len(self.joined) == self.link.receivers, self.link.timeout_s):
                missing = sorted(set(range(self.link.receivers)) - self.joined)
                raise DeadlineExceeded(
                    f"waited {self.link.timeout_s:g} s for {self.link.receivers} receiver(s) to join a local "
                    f"weight link; missing: {', '.join(f'receiver-{rank}' for rank in missing)}"
                )
            self.accepted = True
            self.changed.notify_all()


_meetings: dict[str, _Meeting] = {}


class LocalSender:
    """Puts each bucket into the receivers' pipes."""

    def __init__(self, link: Link, device: torch.device) -> None:
        self.link, self.device = link, device
        self._meeting = _meetings[link.address] = _Meeting(link)
        self._under_way: list[_Sending] = []

    def accept(self) -> None:
        """See Sender."""
        self._meeting.accept()

    def buffers(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """See Sender."""
        first, second = (torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        return first, second

    def send(self, flat: Tensor, bucket: Bucket) -> Sending:
        """See Sender."""
        if self.link.address not in _meetings:
            raise WeightSyncError("the local weight link is closed")
        self._meeting.accept()
        handover = _Handover(flat, bucket, self.link.receivers)
        for pipe in self._meeting.pipes:
            pipe.put(handover)
        self._under_way.append(_Sending(handover, self.link))
        return self._under_way[-1]

    def finish(self) -> None:
        """See Sender."""
        for sending in self._under_way:
            sending.wait()
        self._under_way.clear()

    def close(self) -> None:
        """See Sender."""
        self._under_way.clear()
        if _meetings.pop(self.link.address, None) is not None:
            for pipe in self._meeting.pipes:
                pipe.put(None)


@dataclass(frozen=True)
class _Sending:
    handover: _Handover
    link: Link

    def wait(self) -> None:
        handover, deadline = self.handover, time.monotonic() + self.link.timeout_s
        with handover.changed:
            handover.changed.wait_for(lambda: handover.left <= 0 or handover.refusal, deadline - time.monotonic())
            if handover.refusal:
                raise WeightSyncError(f"a local receiver left in the middle of a sync: {handover.refusal}")
            if handover.left > 0:
                raise DeadlineExceeded(
                    f"waited {self.link.timeout_s:g} s for receivers of a local weight link to take their weights; "
                    f"{handover.left} of {self.link.receivers} did not"
                )


class LocalReceiver:
    """Takes buckets out of its pipe."""

    def __init__(self, link: Link, rank: int, device: torch.device, pipe: queue.Queue[_Handover | None]) -> None:
        self.device = device
        self._link, self._rank, self._pipe = link, rank, pipe

    def receive(self, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
        """See Receiver."""
        for bucket in buckets:
            handover = self._next()
            if handover.bucket != bucket:
                problem = (
                    f"the sender sent {handover.bucket.nbytes} bytes of bucket {handover.bucket.index} where "
                    f"{bucket.nbytes} of bucket {bucket.index} were expected; both ends must use the same manifest"
                )
                handover.taken(problem)
                raise WeightSyncError(problem)
            try:
                yield handover.flat
            except BaseException as error:
                handover.taken(f"receiver {self._rank}: {type(error).__name__}: {error}")
                raise
            handover.taken()

    def _next(self) -> _Handover:
        try:
            handover = self._pipe.get(timeout=self._link.timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(
                f"waited {self._link.timeout_s:g} s for the sender of a local weight link to send"
            ) from None
        if handover is None:
            self._pipe.put(None)
            raise WeightSyncError("the sender closed the local weight link in the middle of a sync")
        return handover

    def close(self) -> None:
        """See Receiver; there is nothing to release."""
