"""The process and the host of a worker: its address, its seeds."""

from __future__ import annotations

import os
import random
import socket

import numpy
import torch


def host_address() -> str:
    """The address under which other hosts reach this one; loopback outside a cluster."""
    if (address := os.environ.get("RLHF_HOST_ADDRESS")) is not None:
        return address
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
