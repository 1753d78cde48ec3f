"""The address of an existing Ray cluster: whether it is one, and whether anybody answers there."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from rlhf_core import ConfigError, ResourceError

_PROBE_S = 5.0
_PROCESSES = Path("/proc")


def check_address(address: str, *, timeout_s: float = _PROBE_S) -> None:
    """Knock at a cluster's address before Ray does, which would try for minutes.

    Args:
        address: `host:port`, `ray://host:port`, `auto`, or `local`.
        timeout_s: how long a connection may take.

    Raises:
        ConfigError: the text is no address.
        ResourceError: nothing answers there.
    """
    if address == "local":
        return
    target = (_own_address() if address == "auto" else address).removeprefix("ray://")
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})", target)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ConfigError(
            f"placement.ray_address={address!r} is no address of a Ray cluster; write host:port (the one that `ray "
            "start` prints), ray://host:port, or auto, or leave it out to start a local cluster"
        )
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=timeout_s).close()
    except OSError as error:
        raise ResourceError(
            f"placement.ray_address={address!r}: nothing answers at {target} ({error}); start the cluster (`ray "
            "start --head`), mend the address, or leave it out to start a local one"
        ) from None


def _own_address() -> str:
    """The cluster that `auto` means: that of the variable RAY_ADDRESS, or the one that runs on this host."""
    if named := os.environ.get("RAY_ADDRESS"):
        return named
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        return note.read_text().strip()
    except OSError:
        # A cluster that was started with a folder of its own (`ray start --temp-dir`) leaves no note there.
        for command in _PROCESSES.glob("[0-9]*/cmdline"):
            if (address := _address_of_raylet(command)) is not None:
                return address
        raise ResourceError(
            "placement.ray_address=auto, but no Ray cluster runs on this host and RAY_ADDRESS is not set; start "
            "one (`ray start --head`), write its host:port, or leave the key out to start a local one"
        ) from None


def _address_of_raylet(command: Path) -> str | None:
    """The address of the cluster that a process belongs to, if it is a raylet."""
    try:
        program, *arguments = command.read_text(errors="replace").split("\0")
    except OSError:
        return None
    found = [argument for argument in arguments if argument.startswith("--gcs-address=")]
    return found[0].partition("=")[2] if found and Path(program).name == "raylet" else None
