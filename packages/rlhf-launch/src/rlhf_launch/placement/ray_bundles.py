"""Rooms in a Ray cluster: one reservation a host and set of roles, and which devices each worker has in it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core import ResourceError

from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.layout import Host, Layout, lay_out

_NODE = "ray.io/node-id"
"""Ray's label of a host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one worker runs, now and whenever it is started again."""

    plan: WorkerPlan
    bundle: int
    node: str
    """Ray's id of the host."""
    devices: tuple[str, ...] = ()
    """Its GPUs, as CUDA_VISIBLE_DEVICES names them on that host."""

    @property
    def env_vars(self) -> dict[str, str]:
        """Variables of the worker's process: its devices and its threads."""
        found: dict[str, str] = {}
        if self.devices:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        # The bundle holds the cores, not the worker, so that Ray would give it a single thread.
        if "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(1, int(self.plan.cpus)))
        return found


class Reservation:
    """Room for all workers of a run: a bundle of Ray's for each host and set of roles that share devices.

    A holder in each bundle takes its GPUs from Ray and tells which these are. Workers take none from Ray: each sees
    the ones that the layout gives it, the same ones as its neighbours of other roles.
    """

    def __init__(self, ray: Any, layout: Layout, *, timeout_s: float) -> None:
        """Reserve room, and find out the devices.

        Raises:
            ResourceError: the cluster gave none in time.
        """
        from ray.util.placement_group import placement_group

        self._ray = ray
        self._holders: list[Any] = []
        self._group: Any = placement_group(
            [_resources(bundle.cpus, bundle.gpus) for bundle in layout.bundles],
            strategy="PACK",
            bundle_label_selector=[{_NODE: bundle.host.node} for bundle in layout.bundles],
        )
        workers = sum(len(bundle.seats) for bundle in layout.bundles)
        if not self._group.wait(timeout_seconds=timeout_s):
            self.release()
            raise ResourceError(
                f"the Ray cluster gave no room for {workers} workers within {timeout_s:g} s; other jobs may hold "
                "its resources (see `ray status`)"
            )
        ids = self._devices(layout, timeout_s)
        self.places: Mapping[str, Place] = {
            seat.plan.name: Place(
                plan=seat.plan,
                bundle=number,
                node=bundle.host.node,
                devices=tuple(ids[number][device] for device in seat.devices),
            )
            for number, bundle in enumerate(layout.bundles)
            for seat in bundle.seats
        }

    def _devices(self, layout: Layout, timeout_s: float) -> dict[int, Sequence[str]]:
        """The GPUs of each bundle that has any, in order; their holders stay until the end."""
        holder = self._ray.remote(_Holder)
        held = {}
        for number, bundle in enumerate(layout.bundles):
            if bundle.gpus:
                options = {"num_cpus": 0, "num_gpus": bundle.gpus, "scheduling_strategy": self.strategy(number)}
                held[number] = holder.options(**options).remote()
        self._holders += held.values()
        asked = [one.devices.remote() for one in held.values()]
        return dict(zip(held, self._ray.get(asked, timeout=timeout_s), strict=True))

    def strategy(self, bundle: int) -> Any:
        """What tells Ray to start an actor in a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def release(self) -> None:
        """Give the room back; the holders end with it."""
        from ray.util.placement_group import remove_placement_group

        self._holders.clear()
        remove_placement_group(self._group)


class _Holder:
    """Holds the GPUs of a bundle, so that Ray gives them to nobody else."""

    def devices(self) -> list[str]:
        """Their names, as CUDA_VISIBLE_DEVICES has them, in ascending order."""
        import ray

        ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return sorted(ids, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def hosts_of(ray: Any, *, free: bool = False) -> list[Host]:
    """The hosts of the cluster that this process has joined, in the order of their addresses.

    Args:
        ray: the module, initialised.
        free: count what no job holds now, where Ray tells; else all that there is.
    """
    left: Mapping[str, Mapping[str, float]] = {}
    if free:
        try:
            from ray._private.state import available_resources_per_node

            left = available_resources_per_node()
        except Exception:  # a Ray client does not tell; all is counted then
            left = {}
    hosts = []
    for node in ray.nodes():
        if node["Alive"]:
            sizes = left.get(node["NodeID"], {}) if left else node["Resources"]
            gpus, cpus = int(sizes.get("GPU", 0) + 1e-6), float(sizes.get("CPU", 0))
            hosts.append(Host(name=node["NodeManagerAddress"], gpus=gpus, cpus=cpus, node=node["NodeID"]))
    return _told_apart(sorted(hosts, key=lambda host: (_numbers(host.name), host.node)))


def place_beside(ray: Any, plan: WorkerPlan, gone: Collection[str]) -> Layout:
    """The layout of one worker, without its parts, on what is free now, on no host of those given.

    Raises:
        ResourceError: no other host has room.
        ConfigError: see `lay_out`.
    """
    return lay_out([replace(plan, parts=())], [host for host in hosts_of(ray, free=True) if host.node not in gone])


def place_in(ray: Any, plans: Sequence[WorkerPlan]) -> Layout:
    """The layout of workers on the hosts of the cluster: on what is free now if that will do.

    Raises:
        ResourceError: not even an empty cluster has room.
        ConfigError: see `lay_out`.
    """
    layout = lay_out(plans, hosts_of(ray))
    try:
        return lay_out(plans, hosts_of(ray, free=True))
    except ResourceError:  # Ray waits until other jobs have given room back
        return layout


def _resources(cpus: float, gpus: int) -> dict[str, float]:
    found = {"CPU": cpus} if cpus else {}
    if gpus:
        found["GPU"] = gpus
    # Ray refuses a bundle of nothing.
    return found or {"CPU": 0.001}


def _numbers(address: str) -> tuple[bool, tuple[int, ...], str]:
    """By which addresses are sorted: 10.0.0.9 before 10.0.0.10."""
    parts = address.split(".")
    numeric = all(part.isdigit() for part in parts)
    return not numeric, tuple(map(int, parts)) if numeric else (), address


def _told_apart(hosts: Sequence[Host]) -> list[Host]:
    """Hosts with names of their own, where several raylets share an address."""
    names = [host.name for host in hosts]
    return [
        host
        if names.count(host.name) == 1
        else Host(name=f"{host.name} ({host.node[:8]})", gpus=host.gpus, cpus=host.cpus, node=host.node)
        for host in hosts
    ]
