"""Broadcast by a process group: `gloo` between processes and hosts, `nccl` between GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from rlhf_core.errors import DeadlineExceeded, WeightSyncError
from rlhf_core.weight_sync.manifest import Bucket
from rlhf_core.weight_sync.transports.rendezvous import (
    LEFT,
    StoreBoard,
    accept,
    ask,
    await_receivers,
    reach,
    reach_to_release,
    release_sender,
)
from rlhf_core.weight_sync.transports.transport import Link, Sending, closed_on_error


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
    prefixed = PrefixStore("group", board.store)
    try:
        if link.kind == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            with torch.cuda.device(device):
                return ProcessGroupNCCL(prefixed, group_rank, link.world_size, options)
        from torch.distributed import ProcessGroupGloo

        return ProcessGroupGloo(prefixed, group_rank, link.world_size, timeout)
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"rank {group_rank} of {link.world_size} waited {link.timeout_s:g} s for the other ends of the "
            f"{link.kind} weight link at {link.address}: {error}"
        ) from error


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
        self._syncs = 0
        self._under_way: WeakSet[_Sending] = WeakSet()

    def accept(self) -> None:
        """See Sender."""
        if self._group is None and self._board is not None:
            with closed_on_error(self):
                accept(self._board, self.link)
                self._group = _process_group(self.link, 0, self._board, self.device)

    def buffers(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """See Sender."""
        return self._buffers.get(nbytes)

    def send(self, flat: Tensor, bucket: Bucket) -> Sending:
        """See Sender."""
        if self._group is None:
            raise WeightSyncError(f"the weight link at {self.link.address} is closed or not accepted yet")
        with _failing(self.link, "sending weights"):
            sending = _Sending(self._group.broadcast(flat, 0), self.link)
        self._under_way.add(sending)
        return sending

    def finish(self) -> None:
        """See Sender. Small buckets lie in the sockets' buffers, so that sending them proves nothing."""
        if self._board is None:
            raise WeightSyncError(f"the weight link at {self.link.address} is closed")
        self._syncs += 1
        await_receivers(self._board, self.link, f"sync-{self._syncs}")
        _settle(self.link, self.device)

    def close(self) -> None:
        """See Sender."""
        for sending in self._under_way:
            sending.work = None
        self._group = _closed(self._group, self.link)
        self._board = None


@dataclass(eq=False)
class _Sending:
    work: Any
    """None after closing: an error's traceback holds this object, and with it the group and its connections."""
    link: Link

    def wait(self) -> None:
        # With NCCL this only orders CUDA streams. The buffer is reused by copies on this very stream, so no host
        # synchronisation is needed.
        if self.work is None:
            raise WeightSyncError(f"the weight link at {self.link.address} is closed")
        with _failing(self.link, "sending weights"):
            self.work.wait()


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
            with _failing(self._link, "receiving weights"):
                self._arriving.wait()
                last = index + 1 == len(flats)
                self._arriving = None if last else self._group.broadcast(flats[index + 1], 0)
            yield flat

    def close(self) -> None:
        """See Receiver."""
        self._leave()
        self._board = None

    def _leave(self) -> None:
        self._arriving = None
        self._group = _closed(self._group, self._link)


def _settle(link: Link, device: torch.device) -> None:
    """With NCCL, returning from a wait means that the work is queued. A sync ends when it is done."""
    if link.kind == "nccl":
        torch.cuda.current_stream(device).synchronize()


def _closed(group: Any, link: Link) -> None:
    """Leave a group. With NCCL, a broadcast that a dead end left unfinished would block the stream for ever."""
    if link.kind == "nccl" and group is not None:
        group.abort()


@contextlib.contextmanager
def _failing(link: Link, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        late = "imed out" in str(error) or "imeout" in str(error)
        kind = DeadlineExceeded if late else WeightSyncError
        raise kind(f"{what} over {link.kind} at {link.address} failed: {error}") from error
