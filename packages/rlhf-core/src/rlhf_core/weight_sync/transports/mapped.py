"""Memory that sender and receivers both map: `shm` between processes of a host, `ipc` on one GPU.

The sender packs into two segments by turns, the receivers read them where they are: each byte is written once.
Notes on the sender's store say which segment holds which bucket, and which receivers are done with it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.weight_sync.manifest import Bucket
from rlhf_core.weight_sync.transports.mapped_memory import cuda_segment, file_segment, map_cuda, map_file
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


class MappedTransport:
    """See rlhf_core.weight_sync.transports.transport."""

    @staticmethod
    def open(
        kind: str, *, receivers: int, host: str | None, device: torch.device, timeout_s: float
    ) -> MappedSender:
        """The sender owns the store; the segments are made when their size is known."""
        host = host or "127.0.0.1"
        board = StoreBoard(None, host, timeout_s=timeout_s)
        link = Link(kind=kind, address=f"{host}:{board.store.port}", receivers=receivers, timeout_s=timeout_s)
        return MappedSender(link, device, board)

    @staticmethod
    def join(link: Link, rank: int, device: torch.device) -> MappedReceiver:
        """Segments are mapped when the sender announces them."""
        board = reach(link, rank)
        ask(board, link, rank)
        return MappedReceiver(link, rank, device, board)

    @staticmethod
    def release_sender(link: Link) -> None:
        """See rlhf_core.weight_sync.transports.transport.release_sender."""
        release_sender(reach_to_release(link), link)


class MappedSender:
    """Packs into segments and announces them."""

    def __init__(self, link: Link, device: torch.device, board: StoreBoard) -> None:
        self.link, self.device = link, device
        self._board: StoreBoard | None = board
        self._segments: tuple[Tensor, Tensor] | None = None
        self._notes = 0
        self._sent = 0
        self._under_way: list[_Sending | None] = [None, None]

    def accept(self) -> None:
        """See Sender."""
        with closed_on_error(self):
            accept(self._open(), self.link)

    def buffers(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """See Sender. Larger ones than before are new segments, which all receivers must map first."""
        if self._segments is not None and self._segments[0].numel() >= nbytes:
            return self._segments
        board = self._open()
        self._segments = None
        pair: list[Tensor] = []
        handles, releases = [], []
        try:
            for _ in range(2):
                tensor, handle, release = cuda_segment(nbytes, self.device) if self._cuda else file_segment(nbytes)
                pair.append(tensor)
                handles.append(handle)
                releases.append(release)
            self._announce(board, {"segments": handles})
            await_receivers(board, self.link, f"done-{self._notes}")
            board.remove([f"note-{self._notes}"])
        finally:
            # Mapped memory lives on when it is closed, and vanishes with the last process that maps it.
            for release in releases:
                release()
        self._segments = (pair[0], pair[1])
        return self._segments

    def send(self, flat: Tensor, bucket: Bucket) -> Sending:
        """See Sender."""
        board = self._open()
        slot = self._slot_of(flat, bucket)
        if self._cuda:
            torch.cuda.current_stream(self.device).synchronize()
        self._sent += 1
        self._announce(board, {"slot": slot, "index": bucket.index, "nbytes": bucket.nbytes})
        sending = self._under_way[slot] = _Sending(self, self._notes)
        return sending

    def _announce(self, board: StoreBoard, note: dict[str, Any]) -> None:
        self._notes += 1
        board.post(f"note-{self._notes}", json.dumps(note).encode())

    def _slot_of(self, flat: Tensor, bucket: Bucket) -> int:
        """The segment that `flat` lies in; memory from elsewhere is copied into the one that is free next."""
        for slot, segment in enumerate(self._segments or ()):
            if segment.data_ptr() == flat.data_ptr():
                return slot
        slot = self._sent % 2
        segments = self.buffers(bucket.nbytes)
        if (sending := self._under_way[slot]) is not None:
            sending.wait()
        segments[slot][: bucket.nbytes].copy_(flat)
        return slot

    def finish(self) -> None:
        """See Sender."""
        for sending in sorted(filter(None, self._under_way), key=lambda sending: sending.number):
            sending.wait()
        self._sent = 0

    def close(self) -> None:
        """See Sender."""
        if self._board is not None:
            with contextlib.suppress(WeightSyncError):
                self._board.post(f"note-{self._notes + 1}", LEFT)
        self._board = None
        self._segments = None

    @property
    def _cuda(self) -> bool:
        return self.link.kind == "ipc"

    def _open(self) -> StoreBoard:
        if self._board is None:
            raise WeightSyncError(f"the weight link at {self.link.address} is closed")
        return self._board


@dataclass
class _Sending:
    sender: MappedSender
    number: int
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            board = self.sender._open()
            await_receivers(board, self.sender.link, f"done-{self.number}")
            board.remove([f"note-{self.number}"])
            self.done = True


class MappedReceiver:
    """Maps the announced segments and hands out views of them."""

    def __init__(self, link: Link, rank: int, device: torch.device, board: StoreBoard) -> None:
        self.device = device
        self._link, self._rank = link, rank
        self._board: StoreBoard | None = board
        self._segments: list[Tensor] = []
        self._notes = 0

    def receive(self, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
        """See Receiver."""
        for bucket in buckets:
            if self._board is None:
                raise WeightSyncError("the weight link is closed")
            note = self._next(self._board, bucket)
            while "segments" in note:
                self._map(self._board, note["segments"])
                note = self._next(self._board, bucket)
            yield from self._bucket(self._board, note, bucket)

    def _next(self, board: StoreBoard, bucket: Bucket) -> dict[str, Any]:
        self._notes += 1
        end = f"the sender of the {self._link.kind} weight link at {self._link.address}"
        what = f"bucket {bucket.index} from {end}"
        (note,) = board.read([f"note-{self._notes}"], timeout_s=self._link.timeout_s, what=what)
        if note == LEFT:
            raise WeightSyncError(f"{end} closed it in the middle of a sync")
        return json.loads(note)

    def _bucket(self, board: StoreBoard, note: dict[str, Any], bucket: Bucket) -> Iterator[Tensor]:
        with self._leaving_on_error(board):
            if (note["index"], note["nbytes"]) != (bucket.index, bucket.nbytes):
                raise WeightSyncError(
                    f"the sender sent {note['nbytes']} bytes of bucket {note['index']} where {bucket.nbytes} of "
                    f"bucket {bucket.index} were expected; both ends must use the same manifest"
                )
            yield self._segments[note["slot"]][: bucket.nbytes]
            if self._link.kind == "ipc":
                torch.cuda.current_stream(self.device).synchronize()
        self._done(board)

    def _map(self, board: StoreBoard, handles: list[Any]) -> None:
        self._segments.clear()
        cuda = self._link.kind == "ipc"
        with self._leaving_on_error(board):
            self._segments = [map_cuda(handle, self.device) if cuda else map_file(handle) for handle in handles]
        self._done(board)

    def _done(self, board: StoreBoard, value: bytes = b"") -> None:
        board.post(f"done-{self._notes}/{self._rank}", value)

    @contextlib.contextmanager
    def _leaving_on_error(self, board: StoreBoard) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(WeightSyncError):  # the first cause is on its way up
                self._done(board, LEFT)
            raise

    def close(self) -> None:
        """See Receiver."""
        self._board = None
        self._segments.clear()
