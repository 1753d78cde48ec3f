"""The process and the host of a worker: its address, its memory, its seeds."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import random
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address, ip_network

import numpy
import torch
from rlhf_core import ResourceError

_SIOCGIFADDR = 0x8915
_GLIBC = "libc.so.6"
_KEPT = {-1: -1, -3: (1 << 31) - 1}
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3), as high as they go."""
_COLLECT_AFTER = 50_000
"""New objects before the collector looks; Python's own is 700."""
_ADDRESS = "RLHF_HOST_ADDRESS"
INTERFACE = "RLHF_INTERFACE"
"""Variable: the network interface, or the network, over which hosts reach each other."""


def host_address() -> str:
    """The address under which other hosts reach this one; loopback outside a cluster.

    The variable RLHF_HOST_ADDRESS, else that of the interface or network in RLHF_INTERFACE, else the one that the
    cluster knows, else the one of the host's name.

    Raises:
        ResourceError: this host has no such interface.
    """
    if address := os.environ.get(_ADDRESS):
        return address
    if wanted := os.environ.get(INTERFACE):
        return _address_in(wanted)[1]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def use_address(address: str) -> None:
    """Let `host_address` be the one under which the cluster knows this host, unless the user has named one.

    Gloo looks for an interface by the host's name, which on many hosts means loopback; it gets that of the address.
    NCCL chooses well by itself, and is told only what the user asks for.

    Raises:
        ResourceError: this host has no such interface as the user names.
    """
    if (wanted := os.environ.get(INTERFACE)) and _ADDRESS not in os.environ:
        name, address = _address_in(wanted)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    os.environ.setdefault(_ADDRESS, address)
    if (interface := _interface_of(os.environ[_ADDRESS])) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _address_in(wanted: str) -> tuple[str, str]:
    """The interface and address of this host that an interface's name or a network means."""
    there = _interfaces()
    for name, address in there.items():
        if name == wanted or ("/" in wanted and ip_address(address) in ip_network(wanted, strict=False)):
            return name, address
    raise ResourceError(
        f"placement.interface={wanted!r}: {socket.gethostname()} has no such interface with an IPv4 address; it "
        f"has {', '.join(f'{name} ({address})' for name, address in there.items())}"
    )


def _interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None if none has, or the system does not tell."""
    return next((name for name, own in _interfaces().items() if own == address), None)


def _interfaces() -> dict[str, str]:
    """The IPv4 addresses of this host by the names of its network interfaces."""
    found = {}
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            found[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return found


def device_names(device: str) -> list[str]:
    """The accelerators that this process sees, by names that are the same in every process; none on a CPU."""
    if not device.startswith("cuda"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(torch.cuda.device_count())) if visible is None else filter(None, visible.split(","))
    return [f"{socket.gethostname()}/{name}" for name in names]


def trim_memory() -> None:
    """Give freed host memory back to the system, which the C library would keep for later; does nothing without
    glibc."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(_GLIBC).malloc_trim(0)


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """Python's collector looks seldom, and never at what there is now.

    The samples of a step are millions of objects in no cycle; by default it would go through all of them, and
    through everything that is imported, again and again while they arrive.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def keep_freed_memory() -> None:
    """Have the C library keep freed host memory until `trim_memory`, large pieces included; does nothing without
    glibc.

    It gives them back at once otherwise, and every step of a model on the CPU asks for its activations again, page
    by page.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(_GLIBC)
        for setting, value in _KEPT.items():
            library.mallopt(setting, value)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
