"""Moving flat buckets from one sender to many receivers: one interface, a kind per placement.

`nccl`   broadcast between GPUs
`ipc`    between processes on the same GPU (CUDA IPC)
`gloo`   broadcast over TCP, CPU tensors: processes on one or many hosts
`shm`    shared memory between processes of one host, CPU tensors
`disk`   safetensors files in a directory that both sides see: other clusters, anything else
`local`  hand-over between threads of one process

The sender opens, hands the picklable `Link` to the receivers by whatever control channel there is, and accepts;
each receiver joins with its rank. Ports are chosen by the listening socket itself, so there is no race for them.
A link carries any number of syncs, one after the other. After a failure it is never used again: open a new one.

Other kinds are found in the entry-point group `rlhf.weight_transports`, or by a `module:Class` path. The class has
the methods of `Transport`, and those of `ReleasesSender` if its senders can wait for receivers that are gone;
`rlhf_core.testing.transport` has the checks that it must pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rlhf_core.checks import check_number, check_whole
from rlhf_core.errors import ConfigError, RLHFError
from rlhf_core.plugins import load_object, load_plugin, plugin_names
from rlhf_core.weight_sync.manifest import Bucket, buffer_bytes

WEIGHT_TRANSPORTS = "rlhf.weight_transports"
_BETWEEN = "\n"
_RECEIVE_BUFFERS = {"disk": 1, "shm": 0, "ipc": 0, "local": 0}
"""Where it is not two."""
_COMMUNICATOR_BYTES = 256 << 20

_BUILT_IN = {
    "disk": "rlhf_core.weight_sync.transports.disk:DiskTransport",
    "gloo": "rlhf_core.weight_sync.transports.broadcast:GroupTransport",
    "ipc": "rlhf_core.weight_sync.transports.mapped:MappedTransport",
    "local": "rlhf_core.weight_sync.transports.local:LocalTransport",
    "nccl": "rlhf_core.weight_sync.transports.broadcast:GroupTransport",
    "shm": "rlhf_core.weight_sync.transports.mapped:MappedTransport",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What a receiver needs to join. Plain data, so that it can travel by any control channel."""

    kind: str
    address: str
    """`host:port` of the sender's store, a directory, or a process-local name. Where receivers have different
    senders (see `shared_link`), that of each receiver's sender, in order, one a line."""
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
        """Block until the buffer may be reused.

        Raises:
            DeadlineExceeded: receivers did not take it in time.
            WeightSyncError: a receiver is gone.
        """
        ...


class Sender(Protocol):
    """The sending end."""

    link: Link
    device: torch.device

    def accept(self) -> None:
        """Block until all receivers have joined, or raise DeadlineExceeded with the ranks that have not."""
        ...

    def buffers(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """Two byte buffers to pack into, of at least `nbytes`, from which sending takes no further copy."""
        ...

    def send(self, flat: Tensor, bucket: Bucket) -> Sending:
        """Start sending a contiguous byte tensor of `bucket.nbytes`, out of `buffers` or any other memory."""
        ...

    def finish(self) -> None:
        """End of one sync: block until every receiver has taken every bucket."""
        ...

    def close(self) -> None:
        """Drop the connection; may be called twice."""
        ...


class Receiver(Protocol):
    """The receiving end."""

    device: torch.device

    def receive(self, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
        """The byte buffers of one sync, in order. Each is valid until the next one is asked for.

        To end early, close the iterator; the link is then of no further use.

        Raises:
            DeadlineExceeded: nothing came in time.
            WeightSyncError: the sender closed, failed, or sends something else.
        """
        ...

    def close(self) -> None:
        """Drop the connection; may be called twice."""
        ...


class Transport(Protocol):
    """A kind of link: a class of which no instances are made."""

    @staticmethod
    def open(kind: str, *, receivers: int, host: str | None, device: torch.device, timeout_s: float) -> Sender:
        """The sending end; see `open_sender`."""
        ...

    @staticmethod
    def join(link: Link, rank: int, device: torch.device) -> Receiver:
        """The end of receiver `rank`; blocks until the sender accepts or the link's deadline passes."""
        ...


@runtime_checkable
class ReleasesSender(Protocol):
    """A transport whose sender, while it waits for receivers, can be made to fail from another process."""

    @staticmethod
    def release_sender(link: Link) -> None:
        """See `release_sender`."""
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
        kind: one of the kinds above.
        receivers: how many ranks will join.
        host: address under which the receivers reach this process; loopback if None. For `disk` the directory,
            which is created; if None, the one in the environment variable RLHF_WEIGHTS_DIRECTORY, or a temporary
            one.
        device: where the buffers live (`nccl` and `ipc` need a CUDA device).
        timeout_s: deadline of every wait.

    Raises:
        ConfigError: there is no such kind, no receiver, or no positive deadline.
    """
    check_whole("weight link: receivers", receivers, at_least=1)
    check_number("weight link: timeout_s", timeout_s, above=0)
    return _transport(kind).open(
        kind, receivers=receivers, host=host, device=torch.device(device), timeout_s=timeout_s
    )


def join_link(link: Link, rank: int, *, device: torch.device | str = "cpu") -> Receiver:
    """Join a link as receiver `rank` (0-based); blocks until the sender accepts or the deadline passes."""
    if not 0 <= rank < link.receivers:
        raise ConfigError(f"receiver rank {rank} is outside 0..{link.receivers - 1}")
    link, rank = _senders_link(link, rank)
    return _transport(link.kind).join(link, rank, torch.device(device))


def shared_link(links: Sequence[Link]) -> Link:
    """One link for receivers with different senders, as ranks that each serve the engine on their own GPU.

    Args:
        links: for each receiver, in order, the link of its sender. A sender's link has as many receivers as there
            are entries of it.

    >>> one, two = (Link(kind="ipc", address=f"a:{port}", receivers=2, timeout_s=9.0) for port in (1, 2))
    >>> shared_link([one, one, two, two]).address
    'a:1\\na:1\\na:2\\na:2'
    """
    (kind,) = {link.kind for link in links}
    for link in links:
        if link.receivers != (found := links.count(link)):
            raise ConfigError(
                f"the sender at {link.address} serves {link.receivers} receivers, and {found} join it"
            )
    address = _BETWEEN.join(link.address for link in links)
    return Link(kind=kind, address=address, receivers=len(links), timeout_s=links[0].timeout_s)


def _senders_link(link: Link, rank: int) -> tuple[Link, int]:
    """The link of a receiver's own sender, and the receiver's rank on that."""
    addresses = link.address.split(_BETWEEN)
    if len(addresses) != link.receivers:
        return link, rank
    mine = addresses[rank]
    return replace(link, address=mine, receivers=addresses.count(mine)), addresses[:rank].count(mine)


def release_sender(link: Link) -> None:
    """Let the sender of a link, or each of several, fail now instead of at its deadline, if it awaits receivers.

    For one who knows that a receiver is gone, from any process that could join the link. A sender that does not
    wait right now is left alone, so repeat it until the sender ends. The link is then of no further use.

    Raises:
        RLHFError: the sender cannot be reached.
    """
    transport = _transport(link.kind)
    if not isinstance(transport, ReleasesSender):
        return
    senders = {part.address: part for part, _ in (_senders_link(link, rank) for rank in range(link.receivers))}
    errors: list[RLHFError] = []
    for sender in senders.values():
        try:
            transport.release_sender(sender)
        except RLHFError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def receiver_bytes(kind: str, bucket_bytes: int) -> int:
    """Bytes that a receiver takes for its end of a link: on its GPU with `nccl`, in host memory with the others.

    With `nccl` there are 256 MiB more for the communicator, an estimate: it depends on NCCL and on the network. A
    transport that is not built in counts as one with two buffers.

    >>> [receiver_bytes(kind, 64 << 20) >> 20 for kind in ("nccl", "gloo", "disk", "shm", "ipc", "local")]
    [384, 128, 64, 0, 0, 0]
    """
    communicator = _COMMUNICATOR_BYTES if kind == "nccl" else 0
    return _RECEIVE_BUFFERS.get(kind, 2) * buffer_bytes(bucket_bytes) + communicator


@contextlib.contextmanager
def closed_on_error(sender: Sender) -> Iterator[None]:
    """Close the sender if the block fails: that tells receivers which wait for it."""
    try:
        yield
    except BaseException:
        sender.close()
        raise


def _transport(kind: str) -> Transport:
    if kind in _BUILT_IN:
        return load_object(_BUILT_IN[kind], what=f"weight transport {kind}")
    check_transport(kind)
    return load_plugin(WEIGHT_TRANSPORTS, kind)


def check_transport(kind: str) -> None:
    """Refuse a kind of link that there is not; nothing is imported.

    Raises:
        ConfigError: names those that there are.
    """
    known = sorted({*_BUILT_IN, *plugin_names(WEIGHT_TRANSPORTS)})
    if ":" not in kind and kind not in known:
        raise ConfigError(f"no weight transport {kind!r}; choose one of {', '.join(known)}")
