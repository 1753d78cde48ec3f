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

import numpy
import torch

_SIOCGIFADDR = 0x8915
_ADDRESS = "RLHF_HOST_ADDRESS"


def host_address() -> str:
    """The address under which other hosts reach this one; loopback outside a cluster.

    The variable RLHF_HOST_ADDRESS, else the one that the cluster knows, else the one of the host's name.
    """
    if address := os.environ.get(_ADDRESS):
        return address
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def use_address(address: str) -> None:
    """Let `host_address` be the one under which the cluster knows this host, unless the user has named one.

    Gloo looks for an interface by the host's name, which on many hosts means loopback; it gets that of the address.
    """
    os.environ.setdefault(_ADDRESS, address)
    if (interface := _interface_of(os.environ[_ADDRESS])) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None if none has, or the system does not tell."""
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == address:
                return name
    return None


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
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
