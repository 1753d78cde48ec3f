"""Workers as actors of a Ray cluster, which is watched while they are there."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from rlhf_core import STOP_SIGNALS, EngineDiedError, ResourceError

from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.layout import Host
from rlhf_launch.placement.ray_address import check_address
from rlhf_launch.placement.ray_bundles import Place, Reservation, hosts_of, place_beside, place_in
from rlhf_launch.placement.ray_handle import PULSE, RayHandle, at_home
from rlhf_launch.placement.reachability import Door, DoorWatch
from rlhf_launch.placement.scratch import ScratchFolder
from rlhf_launch.workers.handles import Handle
from rlhf_launch.workers.pulse import attended
from rlhf_launch.workers.spread_handle import SpreadHandle
from rlhf_launch.workers.waits import WorkerLostError

_HEAD = "head"
_QUIETLY: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
_OWN_HEAD_S = 3.0
_ROOM_S = 30.0
"""How long Ray may take to reserve what is free."""
_HEAD_S = 40.0
"""How long nothing may listen at the head of a cluster: it may be started again meanwhile."""
_STARTS = 3
"""How often Ray is started before this host counts as too busy for it: it gives its own raylet half a minute."""

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Started by `uv run`, Ray would start every worker through uv again, which syncs the environment.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A run whose head is gone says so, and ends by itself; Ray would end this process after a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(7 * 24 * 3600),
    # Ray would give its workers niceness 15: beside other work on the host they would get a thirtieth of a core.
    "RAY_worker_niceness": "0",
}
"""Read by Ray when it starts or joins a cluster; what the user has set is left alone."""
_BYTES_PER_TOKEN = 56
"""Of a sample in Ray's object store: 28 as engines answer (`benchmarks/data_plane.py`), and as much again for the
columns that ranks and critic add."""
_LARGEST_STORE = 0.3
"""Share of the host's memory that the store takes at most: what Ray takes by default."""


class RayCluster:
    """A local or existing Ray cluster, and the placement of this run's workers on it."""

    one_process = False
    _scratch: ClassVar[ScratchFolder | None] = None
    """Ray's folder, where this process has started Ray; of all clusters of the process, as Ray itself is."""
    _deaths: ClassVar[list[str]] = []
    """Workers whose processes died."""

    def __init__(
        self,
        address: str | None = None,
        *,
        transports: Sequence[str] = ("gloo",),
        timeout_s: float = 600.0,
        env_vars: Mapping[str, str] | None = None,
        step_tokens: int = 0,
    ) -> None:
        """Join a cluster, or start one.

        Args:
            address: of an existing cluster; None starts one on this host.
            transports: see Executor.
            timeout_s: how long to wait for room.
            env_vars: variables for all workers.
            step_tokens: tokens of the samples of a step at most, for which a Ray that is started here has room.
        """
        self.transports = transports
        self._variables = dict(env_vars or {})
        for name, value in RAY_VARIABLES.items():
            os.environ.setdefault(name, value)
        import ray
        from ray._private import ray_constants

        # Ray read that variable when it was imported, which may have been long before, by vLLM for instance.
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
        self._ray = ray
        self._timeout_s = timeout_s
        self._step_tokens = step_tokens
        self._address = address
        self._rooms: list[Reservation] = []
        self._places: dict[str, tuple[Reservation, Place]] = {}
        self._handles: list[RayHandle] = []
        self._nodes: dict[Door, str] = {}
        """The node behind the door of each raylet, and of the head (`_HEAD`)."""
        self._gone: set[str] = set()
        """The nodes of hosts that are lost."""
        self._lost: WorkerLostError | None = None
        """Why nothing can be done here any more."""
        self._watch = DoorWatch(self._lose)
        self._owned = not ray.is_initialized()
        if self._owned:
            self._start(address)

    def _start(self, address: str | None) -> None:
        if address is not None:
            check_address(address)
            try:
                with _keeping_signal_handlers():
                    self._ray.init(address=address, **_QUIETLY)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ResourceError(
                    f"placement.ray_address={address!r}: Ray cannot join the cluster: {error}"
                ) from error
            return
        for left in reversed(range(_STARTS)):
            try:
                self._start_here()
                return
            except Exception as error:  # Ray has no type for it
                if "timed out during startup" not in str(error):
                    raise
                if not left:
                    why = f"the host is too busy, or short of memory: {error}"
                    raise ResourceError(f"Ray did not start here in {_STARTS} attempts; {why}") from error

    def _start_here(self) -> None:
        # Unix sockets live below it, and their paths may have about 100 characters.
        scratch = RayCluster._scratch = ScratchFolder("ray-", parent=Path("/tmp"))
        RayCluster._deaths.clear()
        (scratch.path / "tmp").mkdir()
        try:
            with _keeping_signal_handlers():
                self._ray.init(
                    include_dashboard=False,
                    object_store_memory=_object_store_bytes(self._step_tokens),
                    _temp_dir=str(scratch.path),
                    **_QUIETLY,
                )
        except BaseException:
            scratch.end_writers()  # what Ray has started so far, and no longer knows of
            self._stop()
            raise

    def place(self, plans: Sequence[WorkerPlan]) -> list[Handle]:
        """Reserve room for all workers at once, then start them all (they meet while starting).

        Raises:
            ResourceError: there is no room, with what is needed and what there is.
        """
        layout = place_in(self._ray, plans)
        self._watch_doors()
        room = Reservation(self._ray, layout, timeout_s=self._timeout_s)
        self._rooms.append(room)
        self._places |= {name: (room, place) for name, place in room.places.items()}
        return [self._start_with_parts(plan) for plan in plans]

    def restart(self, name: str) -> Handle:
        """Start a worker anew in the room of the one of this name, which must be gone or about to go.

        If its host is lost, the worker gets room on another one; so does each of its parts.

        Raises:
            WorkerLostError: the cluster is gone.
            ResourceError: the worker's host is lost, and no other has room now.
            ConfigError: the worker must be on that host.
        """
        if self._lost is not None:
            raise self._lost
        self._watch_doors()
        plan = self._places[name][1].plan
        members = (plan, *plan.parts)
        for member in members:
            if self._places[member.name][1].node in self._gone:
                others = {self._places[other.name][1].node for other in members if other is not member}
                beside = place_beside(self._ray, member, self._gone | others)
                room = Reservation(self._ray, beside, timeout_s=_ROOM_S)
                self._rooms.append(room)
                self._places[member.name] = room, replace(room.places[member.name], plan=member)
        return self._start_with_parts(plan)

    def _start_with_parts(self, plan: WorkerPlan) -> Handle:
        main = self._start_worker(plan.name)
        return SpreadHandle(main, [self._start_worker(part.name) for part in plan.parts]) if plan.parts else main

    def _start_worker(self, name: str) -> RayHandle:
        room, place = self._places[name]
        plan = place.plan
        options: dict[str, Any] = {
            # The bundle has been given what the worker needs.
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": room.strategy(place.bundle),
            "runtime_env": {"env_vars": self._env_vars(place)},
        }
        if plan.concurrency is not None:
            options["max_concurrency"] = plan.concurrency
        actor = self._ray.remote(concurrency_groups={PULSE: 1})(at_home(attended(plan.worker)))  # type: ignore[call-overload]
        actor = actor.options(**options).remote(*plan.arguments)
        handle = RayHandle(name, actor, logs=self._logs, on_death=self._deaths.append)
        if not self._through_client:
            handle.find_place()
        self._handles.append(handle)
        return handle

    @property
    def _through_client(self) -> bool:
        """Whether a Ray client stands between this process and the cluster, whose hosts it cannot reach."""
        return (self._address or "").startswith("ray://")

    def _watch_doors(self) -> None:
        """Knock at Ray's head and at every host from now on, those that have joined since last time included."""
        if self._through_client:
            return
        known = set(self._nodes.values())
        if _HEAD not in known:
            host, _, port = self._ray.get_runtime_context().gcs_address.rpartition(":")
            # A head that we have started is never started again; one of a cluster may be.
            patience = _OWN_HEAD_S if self._address is None else _HEAD_S
            door = Door(name=f"Ray's head at {host}", host=host.strip("[]"), port=int(port), refused_s=patience)
            self._nodes[door] = _HEAD
        for node in self._ray.nodes():
            if node["Alive"] and node["NodeID"] not in known:
                host = node["NodeManagerAddress"]
                door = Door(name=f"host {host}", host=host, port=node["NodeManagerPort"])
                self._nodes[door] = node["NodeID"]
        self._watch.add(self._nodes)

    def _lose(self, door: Door, why: str) -> None:
        """Let every call to the workers behind a door fail that stays shut, now and later."""
        node = self._nodes[door]
        if node == _HEAD:
            self._lost = WorkerLostError(f"{door.name} is gone, and with it the cluster: {why}")
        elif node == self._ray.get_runtime_context().get_node_id():
            self._lost = WorkerLostError(
                f"Ray's raylet on this host ({door.host}) is gone, and with it all workers of this process: {why}"
            )
        if self._lost is not None and self._logs is not None:
            self._deaths.append(door.name)
            self._lost.add_note(f"Ray's logs are in {self._logs} until the next run starts")
        self._gone.add(node)
        for handle in self._handles:
            if self._lost is not None:
                handle.lose(self._lost)
            elif handle.place is not None and handle.place.node == node:
                handle.lose(EngineDiedError(f"{handle.described} is lost with its host: {why}"))

    def _env_vars(self, place: Place) -> dict[str, str]:
        """What place and plan say; and a worker's temporary files go with the cluster, however either ends."""
        found = {**place.env_vars, **self._variables, **place.plan.env_vars}
        if self._scratch is not None and "TMPDIR" not in os.environ:
            found.setdefault("TMPDIR", str(self._scratch.path / "tmp"))
        return found

    @property
    def _logs(self) -> Path | None:
        """Where Ray's processes of this run write their logs; None where the cluster is not this run's."""
        return None if self._scratch is None else self._scratch.path / "session_latest" / "logs"

    def close(self) -> None:
        """Give the room back; stops Ray if this object started it.

        Ray's folder goes with it, unless the run fails and a worker has died: its log lies there until the next
        start.
        """
        if self._lost is None:
            # A head that has died just now would be waited for.
            for door, why in self._watch.refused():
                self._lose(door, why)
        rooms, self._rooms = self._rooms, []
        if not self._owns_cluster:  # else the rooms go with it
            self._give_back(rooms)
        self._watch.close()
        if not self._owned and self._lost is None:
            return  # whoever has started Ray, or joined it, also stops it; a lost cluster is of no use to anyone
        self._stop()

    @property
    def _owns_cluster(self) -> bool:
        """Whether the cluster ends with this object."""
        return self._owned and self._address is None

    def _give_back(self, rooms: Sequence[Reservation]) -> None:
        """Release the rooms, for as long as the head is not lost: Ray waits for its answer without end."""
        failed: list[BaseException] = []

        def release() -> None:
            try:
                for room in rooms:
                    room.release()
            except BaseException as error:
                failed.append(error)

        releasing = threading.Thread(target=release, name="release", daemon=True)
        releasing.start()
        while self._lost is None and releasing.is_alive():
            releasing.join(0.05)
        if self._lost is None and failed:
            raise failed[0]

    def _stop(self) -> None:
        if self._ray.is_initialized():
            self._shut_down()
        if self._scratch is not None:
            self._scratch.close(keep=bool(self._deaths) and sys.exc_info()[0] is not None)
            RayCluster._scratch = None

    def _shut_down(self) -> None:
        here = self._ray.get_runtime_context().get_node_id()
        if self._lost is not None and self._scratch is not None:
            # Without its head Ray would wait for answers that do not come.
            self._scratch.end_writers()
        self._ray.shutdown()
        if self._scratch is not None:
            self._scratch.end_writers()  # workers that stand still, or whose raylet is gone
        for handle in self._handles:
            if handle.place is not None and handle.place.node == here:
                handle.place.kill()


def cluster_hosts(address: str) -> list[Host]:
    """The hosts of a cluster, with all that they have; joins it for a moment unless this process is in it.

    Raises:
        ConfigError: the text is no address.
        ResourceError: nothing answers there.
    """
    cluster = RayCluster(address)
    try:
        return hosts_of(cluster._ray)
    finally:
        cluster.close()


@contextlib.contextmanager
def _keeping_signal_handlers() -> Iterator[None]:
    """Ray puts its own handlers in the place of the run's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _object_store_bytes(step_tokens: int) -> int:
    """Bytes of the object store: weights do not pass through it, but the samples of a step do.

    What has no room in it goes by way of a disk.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usual = max(80 << 20, min(2 << 30, memory // 20))
    return max(usual, min(step_tokens * _BYTES_PER_TOKEN, int(memory * _LARGEST_STORE)))
