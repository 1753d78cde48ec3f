"""What accelerators can do, by their data sheets, and what this host's processor does, measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from rlhf_core import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or the part of a host that one worker has."""

    name: str
    memory: int
    """Bytes."""
    flops: float
    """Dense 16-bit products per second (a host: 32-bit ones)."""
    bandwidth: float
    """Bytes of its memory per second."""
    link: float
    """Bytes per second to a neighbour on the host."""
    network: float = 25e9
    """Bytes per second to another host, for each device."""
    host_link: float = 25e9
    """Bytes per second between the device and host memory."""
    overhead: int = 0
    """Bytes that a process takes whatever it does: its context, communication buffers."""


def _gpu(name: str, gib: float, tflops: float, gb_per_s: float, link_gb_per_s: float) -> Device:
    return Device(
        name=name,
        memory=int(gib * 2**30),
        flops=tflops * 1e12,
        bandwidth=gb_per_s * 1e9,
        link=link_gb_per_s * 1e9,
        overhead=3 << 29,
    )


DEVICES: Mapping[str, Device] = {
    "a100-40": _gpu("A100 40 GB", 39.4, 312, 1555, 300),
    "a100": _gpu("A100 80 GB", 79.2, 312, 2039, 300),
    "a800": _gpu("A800 80 GB", 79.2, 312, 2039, 200),
    "h100": _gpu("H100 80 GB", 79.1, 989, 3350, 450),
    "h200": _gpu("H200 141 GB", 139.8, 989, 4800, 450),
    "rtx-3090": _gpu("RTX 3090", 23.7, 71, 936, 16),
    "rtx-4090": _gpu("RTX 4090", 23.6, 165, 1008, 25),
}
"""By the names that `rlhf plan --device` takes. FLOPS, bandwidths and links (one direction) of the makers' data
sheets; memory as the driver reports it."""


def device_named(name: str) -> Device:
    """The device of this name, `cpu` for this host's.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "cpu":
        return this_host()
    if name not in DEVICES:
        known = [*DEVICES, "cpu"]
        raise ConfigError(f"plan: no device {name!r}; {did_you_mean(name, known)}there are {', '.join(known)}")
    return DEVICES[name]


def device_here() -> Device | None:
    """The accelerator of this host, if it has one: its own memory, and the rates of the table if it is there."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    like = [device for device in DEVICES.values() if device.name.split()[0].lower() in found.name.lower()]
    known = min(like or [DEVICES["a100"]], key=lambda device: abs(device.memory - found.total_memory))
    return replace(known, name=found.name, memory=found.total_memory)


@cache
def this_host() -> Device:
    """This host, as far as one worker's threads go: a product and a copy are timed, about 0.1 s."""
    import torch
    from rlhf_core import MemoryMeter

    side = torch.randn(768, 768)
    large = torch.empty(16 << 20, dtype=torch.uint8)
    flops = 2 * 768**3 / _best(lambda: side @ side)
    bandwidth = 2 * large.numel() / _best(lambda: large.clone())
    memory = MemoryMeter(torch.device("cpu")).size
    return Device(
        name="this host",
        memory=memory,
        flops=flops,
        bandwidth=bandwidth,
        link=bandwidth / 2,
        network=1e9,
        host_link=bandwidth,
        overhead=400 << 20,
    )


def _best(run: object) -> float:
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        run()  # type: ignore[operator]
        times.append(time.perf_counter() - begin)
    return min(times)
