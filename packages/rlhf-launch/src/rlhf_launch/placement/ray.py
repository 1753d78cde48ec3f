"""Workers as Ray actors: the one module that knows Ray."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from rlhf_core import STOP_SIGNALS, ConfigError, EngineDiedError, ResourceError

from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.scratch import ScratchFolder
from rlhf_launch.workers.handles import finished
from rlhf_launch.workers.pulse import Pulse, attended

_PROBE_S = 5.0
_PULSE = "pulse"
"""The threads of an actor that answer while its others are busy."""


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
        raise ResourceError(
            "placement.ray_address=auto, but no Ray cluster runs on this host and RAY_ADDRESS is not set; start "
            "one (`ray start --head`), write its host:port, or leave the key out to start a local one"
        ) from None


class RayCluster:
    """A local or existing Ray cluster, and the placement of this run's workers on it."""

    one_process = False
    _scratch: ClassVar[ScratchFolder | None] = None
    """Ray's folder, where this process has started Ray; of all clusters of the process, as Ray itself is."""
    _deaths: ClassVar[list[str]] = []
    """Workers whose processes died."""

    def __init__(
        self, address: str | None = None, *, transports: Sequence[str] = ("gloo",), timeout_s: float = 600.0
    ) -> None:
        self.transports = transports
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Started by `uv run`, Ray would start every worker through uv again, which syncs the environment.
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self._ray = ray
        self._timeout_s = timeout_s
        self._group: Any = None
        self._slots: dict[str, tuple[int, WorkerPlan]] = {}
        self._owned = not ray.is_initialized()
        if self._owned:
            self._start(address)

    def _start(self, address: str | None) -> None:
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is not None:
            check_address(address)
            try:
                with _keeping_signal_handlers():
                    self._ray.init(address=address, **settings)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ResourceError(
                    f"placement.ray_address={address!r}: Ray cannot join the cluster: {error}"
                ) from error
            return
        # Unix sockets live below it, and their paths may have about 100 characters.
        scratch = RayCluster._scratch = ScratchFolder("ray-", parent=Path("/tmp"))
        RayCluster._deaths.clear()
        (scratch.path / "tmp").mkdir()
        try:
            with _keeping_signal_handlers():
                self._ray.init(
                    include_dashboard=False,
                    object_store_memory=_object_store_bytes(),
                    _temp_dir=str(scratch.path),
                    **settings,
                )
        except BaseException:
            self.close()
            raise

    def check_resources(self, plans: Sequence[WorkerPlan]) -> None:
        """Refuse a run that can never be placed, before anything heavy is started.

        Raises:
            ResourceError: what is needed, what there is, and what to change.
        """
        available = self._ray.cluster_resources()
        for resource, need in {
            "CPU": sum(plan.cpus for plan in plans),
            "GPU": sum(plan.gpus for plan in plans),
        }.items():
            have = available.get(resource, 0)
            if need > have + 1e-6:
                roles = ", ".join(f"{plan.name} ({getattr(plan, resource.lower() + 's'):g})" for plan in plans)
                raise ResourceError(
                    f"the run needs {need:g} {resource} for {len(plans)} workers, the Ray cluster has {have:g}: "
                    f"{roles}. Use fewer `train.ranks` or `rollout.engines`, a lower "
                    f"`placement.{resource.lower()}s_per_worker`, or a larger cluster"
                )

    def place(self, plans: Sequence[WorkerPlan]) -> list[RayHandle]:
        """Reserve room for all workers at once, then start them all (they meet while starting)."""
        from ray.util.placement_group import placement_group

        self.check_resources(plans)
        bundles = [{"CPU": plan.cpus, **({"GPU": plan.gpus} if plan.gpus else {})} for plan in plans]
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(timeout_seconds=self._timeout_s):
            raise ResourceError(
                f"the Ray cluster gave no room for {len(plans)} workers within {self._timeout_s:g} s; other jobs "
                "may hold its resources (see `ray status`)"
            )
        self._slots = {plan.name: (index, plan) for index, plan in enumerate(plans)}
        return [self._start_worker(plan.name) for plan in plans]

    def restart(self, name: str) -> RayHandle:
        """Start a worker anew in the room of the one of this name, which must be gone or about to go."""
        return self._start_worker(name)

    def _start_worker(self, name: str) -> RayHandle:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index, plan = self._slots[name]
        options: dict[str, Any] = {
            "num_cpus": plan.cpus,
            "num_gpus": plan.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
            "runtime_env": {"env_vars": self._env_vars(plan)},
        }
        if plan.concurrency is not None:
            options["max_concurrency"] = plan.concurrency
        actor = self._ray.remote(concurrency_groups={_PULSE: 1})(attended(plan.worker))  # type: ignore[call-overload]
        actor = actor.options(**options).remote(*plan.arguments)
        return RayHandle(name, actor, logs=self._logs, on_death=self._deaths.append)

    def _env_vars(self, plan: WorkerPlan) -> dict[str, str]:
        """What the plan says; and a worker's temporary files go with the cluster, however either ends."""
        if self._scratch is None or "TMPDIR" in os.environ:
            return dict(plan.env_vars)
        return {"TMPDIR": str(self._scratch.path / "tmp"), **plan.env_vars}

    @property
    def _logs(self) -> Path | None:
        """Where Ray's processes of this run write their logs; None where the cluster is not this run's."""
        return None if self._scratch is None else self._scratch.path / "session_latest" / "logs"

    def close(self) -> None:
        """Give the room back; stops Ray if this object started it.

        Ray's folder goes with it, unless the run fails and a worker has died: its log lies there until the next
        start.
        """
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
            self._group = None
        if not self._owned:
            return
        if self._ray.is_initialized():
            self._ray.shutdown()
        if self._scratch is not None:
            self._scratch.close(keep=bool(self._deaths) and sys.exc_info()[0] is not None)
            RayCluster._scratch = None


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


class RayHandle:
    """A worker in a Ray actor."""

    def __init__(
        self,
        name: str,
        actor: Any,
        *,
        logs: Path | None = None,
        on_death: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Call an actor.

        Args:
            name: of the worker.
            actor: Ray's handle.
            logs: where its process writes its logs, if that is known.
            on_death: is told the name of a worker whose process died.
        """
        self.name = name
        self._actor = actor
        self._logs, self._on_death = logs, on_death

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See handles.Handle; errors arrive as the worker raised them."""
        return self._settled(method, getattr(self._actor, method).remote(*args, **kwargs).future())

    def _settled(self, method: str, raw: Future[Any]) -> Future[Any]:
        """The future of a call, with errors as the worker raised them."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                future.set_result(done.result())
                return
            try:
                error = _first_cause(self.name, method, error)
                if isinstance(error, EngineDiedError) and self._actor is not None:
                    self._on_death(self.name)
                    if self._logs is not None:
                        error.add_note(f"the logs of {self.name} are in {self._logs} until the next run starts")
            finally:  # whatever happens here, the caller must hear of the failure
                future.set_exception(error)

        raw.add_done_callback(settle)
        return future

    def pulse(self) -> Future[Pulse]:
        """See Handle."""
        if self._actor is None:
            raise EngineDiedError(f"{self.name} is closed")
        return self._settled("pulse", self._actor.pulse.options(concurrency_group=_PULSE).remote().future())

    def begin_close(self) -> Future[Any]:
        """See Handle."""
        return finished(None) if self._actor is None else self.call("close")

    def end(self) -> None:
        """See Handle."""
        if self._actor is None:
            return
        import ray

        actor, self._actor = self._actor, None
        ray.kill(actor)


def _first_cause(name: str, method: str, error: BaseException) -> BaseException:
    """The exception that the worker raised, without Ray's wrapper around it."""
    from ray.exceptions import RayActorError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, BaseException):
            cause.add_note(f"raised by {name} in {method}; its traceback:\n{error}")
            return cause
        return error
    if isinstance(error, RayActorError):
        return EngineDiedError(f"{name} died during {method}: {error}")
    return error


def _object_store_bytes() -> int:
    """Bytes of the object store: a small share of memory, since batches pass through it and weights do not."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(80 << 20, min(2 << 30, memory // 20))
