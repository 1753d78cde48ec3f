"""Broadcast by a process group: `gloo` between processes and hosts, `nccl` between GPUs.

A receiver may die at any time, and the sender's process, a training rank, must live on. Waits are on the host, with
the link's deadline; the sender's broadcasts are ended by a guard (`guard`) when they stand still. With NCCL,
torch's own watchdog would end the process for the sake of a broadcast that did not; here it may only clean up.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from rlhf_core.errors import DeadlineExceeded, RLHFError, WeightSyncError
from rlhf_core.weight_sync.manifest import Bucket
from rlhf_core.weight_sync.transports.guard import TransferGuard, look_until
from rlhf_core.weight_sync.transports.rendezvous import (
    LEFT,
    StoreBoard,
    accept,
    ask,
    await_receivers,
    reach,
    reach_to_release,
    release_sender,
    released,
)
from rlhf_core.weight_sync.transports.transport import Link, Sending, closed_on_error

_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort the communicators after an error, do not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # do not end the process because that abort takes long
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_WATCHDOG_SLACK = 100.0
_SENDER_LEFT = "sender/left"
_ASK_S = 0.25
"""How often a receiver that waits looks for the sender's note."""


class GroupTransport:
    """See rlhf_core.weight_sync.transports.transport."""

    @staticmethod
    def open(kind: str, *, receivers: int, host: str | None, device: torch.device, timeout_s: float) -> GroupSender:
        """The sender is rank 0 and owns the store that the group meets at."""
        host = host or "127.0.0.1"
        board = StoreBoard(None, host, timeout_s=timeout_s)
        link = Link(kind=kind, address=f"{host}:{board.store.port}", receivers=receivers, timeout_s=timeout_s)
        return GroupSender(link, device, board)

    @staticmethod
    def join(link: Link, rank: int, device: torch.device) -> GroupReceiver:
        """Receivers are ranks 1, 2, ..."""
        board = reach(link, rank)
        # Meeting first: who is missing is then known by name, which a process group does not tell.
        ask(board, link, rank)
        return GroupReceiver(link, rank, device, board)

    @staticmethod
    def release_sender(link: Link) -> None:
        """See rlhf_core.weight_sync.transports.transport.release_sender."""
        release_sender(reach_to_release(link), link)


def _process_group(link: Link, group_rank: int, board: StoreBoard, device: torch.device) -> Any:
    """A process group of its own: torch's default group, which the training engine uses, is not touched."""
    from torch.distributed import PrefixStore

    timeout = timedelta(seconds=link.timeout_s)
    # The deadline over NCCL is ours: torch's watchdog is not to find a reason before it.
    watched = timedelta(seconds=_WATCHDOG_SLACK * link.timeout_s)
    prefixed = PrefixStore("group", board.store)
    try:
        if link.kind == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = watched
            with torch.cuda.device(device), _watchdog_only_cleans_up():
                return ProcessGroupNCCL(prefixed, group_rank, link.world_size, options)
        from torch.distributed import ProcessGroupGloo

        return ProcessGroupGloo(prefixed, group_rank, link.world_size, timeout)
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"rank {group_rank} of {link.world_size} waited {link.timeout_s:g} s for the other ends of the "
            f"{link.kind} weight link at {link.address}: {error}"
        ) from error


@contextlib.contextmanager
def _watchdog_only_cleans_up() -> Iterator[None]:
    """Make a group of NCCL's inside whose threads never end this process.

    A group reads these variables when it is made; those of the training engine's own groups stay as they are.
    """
    before = {name: os.environ.get(name) for name in _WATCHDOG}
    os.environ.update(_WATCHDOG)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Buffers:
    """Two byte buffers. On CPU they are kept, since fresh memory costs more than moving the weights does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: tuple[Tensor, Tensor] | None = None

    def get(self, nbytes: int) -> tuple[Tensor, Tensor]:
        if self._kept is not None and self._kept[0].numel() >= nbytes:
            return self._kept
        self._kept = None
        fresh = tuple(torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2))
        if self._device.type == "cpu":
            self._kept = (fresh[0], fresh[1])
        return fresh[0], fresh[1]


class GroupSender:
    """The sender: rank 0 of the group."""

    def __init__(self, link: Link, device: torch.device, board: StoreBoard) -> None:
        self.link, self.device = link, device
        self._board: StoreBoard | None = board
        self._buffers = _Buffers(device)
        self._group: Any = None
        self._guard: TransferGuard | None = None
        self._syncs = 0
        self._under_way: WeakSet[_Sending] = WeakSet()

    def accept(self) -> None:
        """See Sender."""
        if self._group is None and self._board is not None:
            with closed_on_error(self):
                accept(self._board, self.link)
                self._group = _process_group(self.link, 0, self._board, self.device)
                self._guard = _guard(self.link, self._group)

    def buffers(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """See Sender."""
        return self._buffers.get(nbytes)

    def send(self, flat: Tensor, bucket: Bucket) -> Sending:
        """See Sender."""
        if self._group is None or self._guard is None:
            raise WeightSyncError(f"the weight link at {self.link.address} is closed or not accepted yet")
        self._guard.check()
        with _failing(self.link, "sending weights"):
            sending = _Sending(self._group.broadcast(flat, 0), self.link, self._guard)
        self._guard.watch(sending.work)
        self._under_way.add(sending)
        return sending

    def finish(self) -> None:
        """See Sender. Small buckets lie in the sockets' buffers, so that sending them proves nothing."""
        if self._board is None:
            raise WeightSyncError(f"the weight link at {self.link.address} is closed")
        self._syncs += 1
        await_receivers(self._board, self.link, f"sync-{self._syncs}")

    def close(self) -> None:
        """See Sender."""
        for sending in self._under_way:
            sending.work = None
        unfinished = [] if self._guard is None else self._guard.unfinished()
        if self._guard is not None:
            self._guard.close()
        self._group = _closed(self._group, self.link, unfinished)
        if self._board is not None:
            with contextlib.suppress(WeightSyncError):
                self._board.post(_SENDER_LEFT)
        self._board = None


@dataclass(eq=False)
class _Sending:
    work: Any
    """None after closing: an error's traceback holds this object, and with it the group and its connections."""
    link: Link
    guard: TransferGuard

    def wait(self) -> None:
        # The work's own wait is one of streams with NCCL. With Gloo it lasts until the link's deadline if the
        # receiver went before the connection was complete, and aborting the group does not end it.
        self.guard.wait(self._open_work())
        try:
            with _failing(self.link, "sending weights"):
                self._open_work().wait()
        except RLHFError:
            self.guard.check()  # if it was ended from there, for what
            raise

    def _open_work(self) -> Any:
        if self.work is None:
            raise WeightSyncError(f"the weight link at {self.link.address} is closed")
        return self.work


class GroupReceiver:
    """A rank of the group that takes what rank 0 broadcasts."""

    def __init__(self, link: Link, rank: int, device: torch.device, board: StoreBoard) -> None:
        self.device = device
        self._link, self._rank = link, rank
        self._board: StoreBoard | None = board
        self._buffers = _Buffers(device)
        self._group: Any = _process_group(link, rank + 1, board, device)
        self._arriving: Any = None
        """The broadcast under way."""
        self._syncs = 0

    def receive(self, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
        """See Receiver. The next bucket comes in while the caller works on this one."""
        if self._group is None or self._board is None:
            raise WeightSyncError("the weight link is closed")
        self._syncs += 1
        note = f"sync-{self._syncs}/{self._rank}"
        try:
            yield from self._receive(buckets)
            _settle(self._link, self.device)
        except BaseException:
            with contextlib.suppress(WeightSyncError):  # the first cause is on its way up
                self._board.post(note, LEFT)
            self._leave()  # the sender may be in the middle of a broadcast, where it reads no notes
            raise
        self._board.post(note)

    def _receive(self, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
        pair = self._buffers.get(max((bucket.nbytes for bucket in buckets), default=0))
        flats = [pair[i % 2][: bucket.nbytes] for i, bucket in enumerate(buckets)]
        with _failing(self._link, "receiving weights"):
            self._arriving = self._group.broadcast(flats[0], 0) if flats else None
        for index, flat in enumerate(flats):
            self._await_arrival()
            with _failing(self._link, "receiving weights"):
                self._arriving.wait()
                last = index + 1 == len(flats)
                self._arriving = None if last else self._group.broadcast(flats[index + 1], 0)
            yield flat

    def _await_arrival(self) -> None:
        """Look at the broadcast until it is over.

        With NCCL, waiting for the work only orders streams; what waits for the device then waits for ever. With
        Gloo, connections outlive a sender that closed amid a transfer to another receiver, and waiting for the work
        would last until the link's deadline; so the sender's note is looked for as well.
        """
        arriving, link = self._arriving, self._link
        deadline = time.monotonic() + link.timeout_s
        while not look_until(arriving.is_completed, timeout_s=_ASK_S):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"waited {link.timeout_s:g} s for weights to come over {link.kind} at {link.address}"
                )
            if self._board is not None and self._board.seen(_SENDER_LEFT) is not None:
                raise WeightSyncError(
                    f"the sender closed the {link.kind} weight link at {link.address} in the middle of a sync"
                )

    def close(self) -> None:
        """See Receiver."""
        self._leave()
        self._board = None

    def _leave(self) -> None:
        arriving, self._arriving = self._arriving, None
        unfinished = [] if arriving is None or arriving.is_completed() else [arriving]
        self._group = _closed(self._group, self._link, unfinished)


def _guard(link: Link, group: Any) -> TransferGuard:
    """The guard of a sender. It reads notes by a connection of its own, since the sender's may be waiting."""
    board: list[StoreBoard] = []

    def given_up() -> bool:
        if not board:
            board.append(reach_to_release(link))
        return released(board[0])

    what = f"{link.kind} weight link at {link.address}"
    return TransferGuard(what, group.abort, given_up, timeout_s=link.timeout_s)


def _settle(link: Link, device: torch.device) -> None:
    """With NCCL, what takes the weights out of the buffers is only queued. A sync ends when it is done."""
    if link.kind == "nccl":
        torch.cuda.current_stream(device).synchronize()


def _closed(group: Any, link: Link, unfinished: list[Any]) -> None:
    """Leave a group. With NCCL, a broadcast that a dead end left unfinished would block the stream for ever.

    A group of Gloo's, when it is let go, waits for its transfers with Python's lock in hand: the whole process
    would stand until the link's deadline. Unfinished ones keep it until they are over.
    """
    if group is None:
        return
    if link.kind == "nccl":
        group.abort()
    elif unfinished:
        _ENDING.keep(group, unfinished)


class _Ending:
    """Groups that were left in the middle of transfers, each held by a thread until these are over."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    def keep(self, group: Any, unfinished: list[Any]) -> None:
        """Hold a group until its transfers are over, which its link's deadline sees to at the latest."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(
            target=self._outlast, args=(group, unfinished), name="weight-link-ending", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def keep_all_to_the_end(self) -> None:
        """Let no group be dropped while the interpreter ends: it would hold that up, or end the process in it."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _outlast(self, group: Any, unfinished: list[Any]) -> None:
        while not all(work.is_completed() for work in unfinished):
            if self._stopped.wait(_LOOK_S):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                return


_ENDING = _Ending()
_LOOK_S = 0.02

atexit.register(_ENDING.keep_all_to_the_end)


@contextlib.contextmanager
def _failing(link: Link, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        late = "imed out" in str(error) or "imeout" in str(error)
        kind = DeadlineExceeded if late else WeightSyncError
        raise kind(f"{what} over {link.kind} at {link.address} failed: {error}") from error
