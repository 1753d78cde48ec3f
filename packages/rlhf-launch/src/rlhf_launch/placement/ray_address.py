"""An existing Ray cluster: its address, whether anybody answers there, and what its workers are told from here."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from rlhf_algos import PlacementSection
from rlhf_core import ConfigError, ResourceError

from rlhf_launch.workers.process import INTERFACE

_PROBE_S = 5.0
_PROCESSES = Path("/proc")
_FORWARDED = ("NCCL_", "GLOO_", "HF_", "RLHF_")
_OF_ONE_HOST = ("RLHF_HOST_ADDRESS", "RLHF_LOCAL_RANK")
"""Variables that mean another thing on each host."""


def cluster_address(configured: str | None) -> str | None:
    """The cluster to join: the configured one, else that of the variable RAY_ADDRESS; None to start one.

    `ray job submit` and the operators of clusters set that variable for the commands that they start.
    """
    named = configured or os.environ.get("RAY_ADDRESS") or None
    return None if named == "local" else named


def worker_env_vars(placement: PlacementSection, *, joined: bool) -> dict[str, str]:
    """Variables that every worker gets from this process, and the network that it is to use.

    Args:
        placement: what is asked for.
        joined: whether the workers belong to a cluster that was there before; those of a cluster that this process
            starts have all its variables anyway.

    Raises:
        ConfigError: `placement.forward_env` names a variable that is not set.
    """
    if missing := [name for name in placement.forward_env if name not in os.environ]:
        raise ConfigError(
            f"placement.forward_env names {missing[0]}, which is not set here; "
            "set it for this command, or leave it out"
        )
    network = {} if placement.interface is None else {INTERFACE: placement.interface}
    if not joined:
        return network
    found = {name for name in os.environ if name.startswith(_FORWARDED) and name not in _OF_ONE_HOST}
    return {name: os.environ[name] for name in sorted(found | set(placement.forward_env))} | network


def check_address(address: str, *, timeout_s: float = _PROBE_S) -> None:
    """Knock at a cluster's address before Ray does, which would try for minutes.

    Args:
        address: `host:port`, `ray://host:port`, or `auto`.
        timeout_s: how long a connection may take.

    Raises:
        ConfigError: the text is no address.
        ResourceError: nothing answers there.
    """
    target = (_own_address() if address == "auto" else address).removeprefix("ray://")
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})", target)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ConfigError(
            f"placement.ray_address={address!r} is no address of a Ray cluster; write host:port (the one that `ray "
            "start` prints), ray://host:port, or auto, or leave it out (and unset RAY_ADDRESS) to start a local "
            "cluster"
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
