"""Safetensors files in a directory that both sides see. It is the slowest transport, and works wherever files do.

    <directory>/<link>/receiver.0, accepted, ...          who takes part
    <directory>/<link>/sync-1/bucket-0.safetensors, ...   one sync; a file appears at once with its content
    <directory>/<link>/taken-1.0, ...                     receiver 0 has all of sync 1

Any safetensors reader can open the files. The link's directory goes when the sender closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from rlhf_core.errors import DeadlineExceeded, WeightSyncError
from rlhf_core.weight_sync.manifest import Bucket
from rlhf_core.weight_sync.transports.rendezvous import (
    LEFT,
    DirectoryBoard,
    accept,
    ask,
    await_receivers,
    release_sender,
)
from rlhf_core.weight_sync.transports.transport import Link, Sending, closed_on_error

DIRECTORY_VARIABLE = "RLHF_WEIGHTS_DIRECTORY"
_CHECKSUM_NAME = "rlhf.checksum"
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class DiskTransport:
    """See rlhf_core.weight_sync.transports.transport."""

    @staticmethod
    def open(kind: str, *, receivers: int, host: str | None, device: torch.device, timeout_s: float) -> DiskSender:
        """A directory of its own within the shared one."""
        # The launcher gives every kind its host's address; only a path names a directory.
        given = host if host and os.sep in host else os.environ.get(DIRECTORY_VARIABLE)
        directory = Path(given) if given else Path(tempfile.gettempdir()) / "rlhf-weights"
        directory = directory / uuid.uuid4().hex
        directory.mkdir(parents=True)
        link = Link(kind=kind, address=str(directory), receivers=receivers, timeout_s=timeout_s)
        return DiskSender(link)

    @staticmethod
    def join(link: Link, rank: int, device: torch.device) -> DiskReceiver:
        """The sender's directory must be there already."""
        if not Path(link.address).is_dir():
            raise DeadlineExceeded(
                f"weight receiver {rank} found no sender at {link.address}: the directory is not there. Both sides "
                f"must see it under this path; {DIRECTORY_VARIABLE} in the sender's environment chooses it"
            )
        board = DirectoryBoard(Path(link.address))
        ask(board, link, rank)
        return DiskReceiver(link, rank, board)

    @staticmethod
    def release_sender(link: Link) -> None:
        """See rlhf_core.weight_sync.transports.transport.release_sender."""
        if Path(link.address).is_dir():
            release_sender(DirectoryBoard(Path(link.address)), link)


class DiskSender:
    """Writes a file per bucket."""

    device = torch.device("cpu")

    def __init__(self, link: Link) -> None:
        self.link = link
        self._board = DirectoryBoard(Path(link.address))
        self._sync = 1
        self._pair: tuple[Tensor, Tensor] | None = None
        self._closed = False

    def accept(self) -> None:
        """See Sender."""
        with closed_on_error(self):
            accept(self._board, self.link)

    def buffers(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """See Sender."""
        if self._pair is None or self._pair[0].numel() < nbytes:
            self._pair = None
            self._pair = (torch.empty(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8))
        return self._pair

    def send(self, flat: Tensor, bucket: Bucket) -> Sending:
        """See Sender."""
        if self._closed:
            raise WeightSyncError(f"the weight link at {self.link.address} is closed")
        folder = _folder(self.link, self._sync)
        path = folder / f"bucket-{bucket.index}.safetensors"
        try:
            folder.mkdir(exist_ok=True)
            with path.with_suffix(".unfinished").open("wb") as file:
                _write(file, flat.cpu(), bucket)
            path.with_suffix(".unfinished").replace(path)
        except OSError as error:
            raise WeightSyncError(f"weights cannot be written to {path}: {error}") from error
        return _Written()

    def finish(self) -> None:
        """See Sender. The files go when all have read them."""
        try:
            await_receivers(self._board, self.link, f"taken-{self._sync}")
        finally:
            shutil.rmtree(_folder(self.link, self._sync), ignore_errors=True)
        self._sync += 1

    def close(self) -> None:
        """See Sender."""
        if not self._closed:
            self._closed = True
            # A receiver that waits for a file sees that its directory is gone.
            shutil.rmtree(self.link.address, ignore_errors=True)


class _Written:
    def wait(self) -> None:
        """The file holds a copy."""


class DiskReceiver:
    """Waits for files and reads them into one reused buffer."""

    device = torch.device("cpu")

    def __init__(self, link: Link, rank: int, board: DirectoryBoard) -> None:
        self._link, self._rank, self._board = link, rank, board
        self._sync = 0
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._closed = False

    def receive(self, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
        """See Receiver."""
        if self._closed:
            raise WeightSyncError("the weight link is closed")
        self._sync += 1
        note = f"taken-{self._sync}/{self._rank}"
        if self._flat.numel() < (size := max((bucket.nbytes for bucket in buckets), default=0)):
            self._flat = torch.empty(size, dtype=torch.uint8)
        try:
            for bucket in buckets:
                yield self._read(bucket)
        except BaseException:
            with contextlib.suppress(WeightSyncError):  # the first cause is on its way up
                self._board.post(note, LEFT)
            raise
        self._board.post(note)

    def _read(self, bucket: Bucket) -> Tensor:
        name = f"bucket-{bucket.index}.safetensors"
        what = f"bucket {bucket.index} from the sender of the disk weight link at {self._link.address}"
        board = DirectoryBoard(_folder(self._link, self._sync))
        board.await_file(name, timeout_s=self._link.timeout_s, what=what, root=Path(self._link.address))
        flat = self._flat[: bucket.nbytes]
        try:
            with (board.directory / name).open("rb") as file:
                _read_into(file, flat, bucket)
        except OSError as error:
            raise WeightSyncError(f"weights cannot be read from {board.directory / name}: {error}") from error
        return flat

    def close(self) -> None:
        """See Receiver."""
        self._closed = True


def _folder(link: Link, sync: int) -> Path:
    return Path(link.address) / f"sync-{sync}"


# ---------------------------------------------------------------- the file format


def _entries(bucket: Bucket) -> Iterator[tuple[str, str, list[int], int, int]]:
    """Name, dtype, shape, offset in the buffer and bytes of all that is in the file."""
    for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
        if bucket.part is not None:  # bytes, of as many files as it takes
            yield spec.name, "U8", [bucket.payload_bytes], offset, bucket.payload_bytes
        elif spec.changed is None:
            yield spec.name, _NAMES[spec.dtype], list(spec.shape), offset, spec.nbytes
        else:  # indices and values as they are
            yield spec.name, "U8", [spec.nbytes], offset, spec.nbytes
    if bucket.checksum:
        size = bucket.nbytes - bucket.payload_bytes
        yield _CHECKSUM_NAME, "U8", [size], bucket.payload_bytes, size


def _header(bucket: Bucket) -> bytes:
    fields: dict[str, Any] = {}
    end = 0
    for name, dtype, shape, _, nbytes in _entries(bucket):
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, flat: Tensor, bucket: Bucket) -> None:
    file.write(_header(bucket))
    data = memoryview(cast(Any, flat.numpy()))
    for *_, offset, nbytes in _entries(bucket):
        file.write(data[offset : offset + nbytes])


def _read_into(file: BinaryIO, flat: Tensor, bucket: Bucket) -> None:
    header = _header(bucket)
    if file.read(len(header)) != header:
        raise WeightSyncError(
            f"the file of bucket {bucket.index} holds other tensors than expected; both ends must use the "
            "same manifest"
        )
    data = memoryview(cast(Any, flat.numpy()))
    for name, *_, offset, nbytes in _entries(bucket):
        if file.readinto(data[offset : offset + nbytes]) != nbytes:  # type: ignore[attr-defined]
            raise WeightSyncError(f"the file of bucket {bucket.index} ends in the middle of {name!r}")
