"""Moving flat buffers from one sender to many receivers: one interface, a kind per placement.

`gloo`   broadcast over TCP, CPU tensors: trainers and generators in different processes or on different hosts
`nccl`   broadcast between GPUs
`local`  hand-over between threads of one process

The sender opens, hands the picklable `Link` to the receivers by whatever control channel there is, and accepts;
each receiver joins with its rank. The port is chosen by the listening socket itself, so there is no race for it.
A link is never reused: after a failure open a new one.
"""

from __future__ import annotations

import queue
import threading
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from rlhf_core.errors import ConfigError, DeadlineExceeded, WeightSyncError


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """All a receiver needs to join. Plain data, so that it can travel by any control channel."""

    kind: str
    address: str
    """`host:port` of the sender's store, or a process-local name."""
    receivers: int
    timeout_s: float
    """Deadline of every wait on this link."""

    @property
    def world_size(self) -> int:
        """Sender and receivers."""
        return self.receivers + 1


class Sending(Protocol):
    """A buffer on its way."""

    def wait(self) -> object:
        """Block until the buffer may be reused."""
        ...


class Sender(Protocol):
    """The sending end."""

    link: Link
    device: torch.device

    def accept(self) -> None:
        """Block until all receivers have joined, or raise DeadlineExceeded."""
        ...

    def send(self, flat: Tensor) -> Sending:
        """Start sending a contiguous byte buffer to all receivers."""
        ...

    def close(self) -> None:
        """Drop the connection; may be called twice."""
        ...


class Receiver(Protocol):
    """The receiving end."""

    device: torch.device

    def receive(self, flat: Tensor) -> None:
        """Fill a contiguous byte buffer of the size that is being sent."""
        ...

    def close(self) -> None:
        """Drop the connection; may be called twice."""
        ...


def open_sender(
    kind: str,
    *,
    receivers: int,
    host: str | None = None,
    device: torch.device | str = "cpu",
    timeout_s: float = 300.0,
) -> Sender:
    """Open the sending end; its `link` tells receivers where to join.

    Args:
        kind: `local`, `gloo` or `nccl`.
        receivers: how many ranks will join.
        host: address under which the receivers reach this process; loopback if None.
        device: where the buffers live (`nccl` needs a CUDA device).
        timeout_s: deadline of every wait.
    """
    try:
        kind_class = _SENDERS[kind]
    except KeyError:
        raise ConfigError(f"no weight transport {kind!r}; choose one of {', '.join(sorted(_SENDERS))}") from None
    return kind_class(receivers, host or "127.0.0.1", torch.device(device), timeout_s)


def join(link: Link, rank: int, *, device: torch.device | str = "cpu") -> Receiver:
    """Join a link as receiver `rank` (0-based); blocks until the sender accepts or the deadline passes."""
    if not 0 <= rank < link.receivers:
        raise ConfigError(f"receiver rank {rank} is outside 0..{link.receivers - 1}")
    if link.kind == "local":
        return _LocalReceiver(link, rank)
    return _GroupReceiver(link, rank, torch.device(device))


# ---------------------------------------------------------------- process groups (gloo, nccl)


def _process_group(link: Link, group_rank: int, store: Any, device: torch.device) -> Any:
    """A process group of its own: torch's default group, which the training engine uses, is not touched."""
    from torch.distributed import PrefixStore

    timeout = timedelta(seconds=link.timeout_s)
    prefixed = PrefixStore("rlhf-weights", store)
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


class _GroupSender:
    """Rank 0 of a process group; owns the store that the group meets at."""

    kind: ClassVar[str] = "gloo"

    def __init__(self, receivers: int, host: str, device: torch.device, timeout_s: float) -> None:
        from torch.distributed import TCPStore

        self.device = device
        # Port 0: the store binds a free port itself and tells which.
        self._store: Any = TCPStore(
            host, 0, receivers + 1, True, timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self.link = Link(
            kind=self.kind,
            address=f"{host}:{self._store.port}",
            receivers=receivers,
            timeout_s=timeout_s,
        )
        self._group: Any = None

    def accept(self) -> None:
        if self._group is None:
            self._group = _process_group(self.link, 0, self._store, self.device)

    def send(self, flat: Tensor) -> Sending:
        if self._group is None:
            raise WeightSyncError(f"the weight link at {self.link.address} is closed or not accepted yet")
        return _GroupSending(self._group.broadcast(flat, 0), self.link)

    def close(self) -> None:
        self._group = None
        self._store = None


class _NcclSender(_GroupSender):
    kind: ClassVar[str] = "nccl"


@dataclass(frozen=True)
class _GroupSending:
    work: Any
    link: Link

    def wait(self) -> None:
        try:
            self.work.wait()
            if self.link.kind == "nccl":
                # wait() only orders CUDA streams; the buffer is reused by copies on this very stream, so no
                # host synchronisation is needed.
                return
        except RuntimeError as error:
            raise WeightSyncError(
                f"sending weights over {self.link.kind} at {self.link.address} failed: {error}"
            ) from error


class _GroupReceiver:
    def __init__(self, link: Link, rank: int, device: torch.device) -> None:
        from torch.distributed import TCPStore

        self.device = device
        self._link = link
        host, port = link.address.rsplit(":", 1)
        try:
            store = TCPStore(
                host,
                int(port),
                link.world_size,
                False,
                timedelta(seconds=link.timeout_s),
                wait_for_workers=False,
            )
        except (RuntimeError, OSError) as error:
            raise DeadlineExceeded(
                f"weight receiver {rank} found no sender at {link.address} within {link.timeout_s:g} s: {error}"
            ) from error
        self._group: Any = _process_group(link, rank + 1, store, device)

    def receive(self, flat: Tensor) -> None:
        if self._group is None:
            raise WeightSyncError("the weight link is closed")
        try:
            self._group.broadcast(flat, 0).wait()
        except RuntimeError as error:
            raise WeightSyncError(
                f"receiving weights over {self._link.kind} from {self._link.address} failed: {error}"
            ) from error

    def close(self) -> None:
        self._group = None


# ---------------------------------------------------------------- within one process

_local_queues: dict[str, list[queue.Queue[tuple[Tensor, threading.Barrier] | None]]] = {}


class _LocalSender:
    """Hands each buffer to the receivers' threads and waits until all have copied it."""

    kind: ClassVar[str] = "local"

    def __init__(self, receivers: int, host: str, device: torch.device, timeout_s: float) -> None:
        self.device = device
        address = uuid.uuid4().hex
        self.link = Link(kind="local", address=address, receivers=receivers, timeout_s=timeout_s)
        _local_queues[address] = [queue.Queue() for _ in range(receivers)]

    def accept(self) -> None:
        """Receivers of this process find the queue by its name; nothing to wait for."""

    def send(self, flat: Tensor) -> Sending:
        if self.link.address not in _local_queues:
            raise WeightSyncError("the local weight link is closed")
        taken = threading.Barrier(self.link.receivers + 1)
        for pipe in _local_queues[self.link.address]:
            pipe.put((flat, taken))
        return _LocalSending(taken, self.link)

    def close(self) -> None:
        for pipe in _local_queues.pop(self.link.address, []):
            pipe.put(None)


@dataclass(frozen=True)
class _LocalSending:
    taken: threading.Barrier
    link: Link

    def wait(self) -> None:
        try:
            self.taken.wait(self.link.timeout_s)
        except threading.BrokenBarrierError:
            raise WeightSyncError(
                f"not all {self.link.receivers} local receivers took a weight buffer within "
                f"{self.link.timeout_s:g} s"
            ) from None


class _LocalReceiver:
    def __init__(self, link: Link, rank: int) -> None:
        self.device = torch.device("cpu")
        self._link = link
        if link.address not in _local_queues:
            raise WeightSyncError(
                "no open local weight link of this name in this process; `local` works within one process, "
                "use gloo or nccl between processes"
            )
        self._pipe = _local_queues[link.address][rank]

    def receive(self, flat: Tensor) -> None:
        try:
            item = self._pipe.get(timeout=self._link.timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(
                f"a local weight receiver waited {self._link.timeout_s:g} s for the sender"
            ) from None
        if item is None:
            raise WeightSyncError("the sender closed the local weight link in the middle of a sync")
        sent, taken = item
        if sent.numel() != flat.numel():
            taken.abort()
            raise WeightSyncError(
                f"the sender sent {sent.numel()} bytes where {flat.numel()} were expected; "
                "both ends must use the same manifest"
            )
        flat.copy_(sent)
        taken.wait(self._link.timeout_s)

    def close(self) -> None:
        """Nothing to release."""


_SENDERS: dict[str, Any] = {"gloo": _GroupSender, "nccl": _NcclSender, "local": _LocalSender}
