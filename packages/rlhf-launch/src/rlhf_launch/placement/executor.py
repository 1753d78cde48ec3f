"""Plans of workers, what places them, and the executor that keeps all of them in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf_launch.workers.handles import Handle, LocalHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRoom:
    """What is reserved for each worker of a role, and where."""

    cpus: float = 0.25
    """CPU cores. Workers mostly take turns, so a share of a core is enough on a machine without GPUs."""
    threads: int | None = None
    """Threads that the role's workers on CPUs have between them while it is their turn; None for what each engine
    takes by itself."""
    gpus: int | None = None
    """GPUs, for a worker on CUDA; None for what it needs: one a training rank, and tensor x pipeline parallel ones
    a rollout engine."""
    devices: str = ""
    """Name of a set of devices that several roles share; empty for devices of the role's own."""
    hosts: int | tuple[str, ...] | None = None
    """Over how many hosts the role's workers are spread, or over which; None for as few as have room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """One worker to be placed."""

    name: str
    worker: type
    arguments: tuple[Any, ...]
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Variables that must be there before the worker's process imports anything."""
    cpus: float = 1.0
    gpus: int = 0
    concurrency: int | None = None
    """Calls that may be under way at once; None for one at a time."""
    role: str = ""
    """The role that it is a worker of; by default its name up to the number at the end (`policy` of `policy-3`)."""
    together: int = 1
    """Consecutive workers of the role, in groups of this many, that must sit on one host."""
    devices: str = ""
    """Roles that name the same set here sit on the same devices; empty for devices of the role's own."""
    hosts: int | tuple[str, ...] | None = None
    """See WorkerRoom."""
    parts: tuple[WorkerPlan, ...] = ()
    """What belongs to the worker on other hosts, each on one of its own; started and ended with it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", self.role or self.name.rpartition("-")[0] or self.name)
        object.__setattr__(self, "devices", self.devices or self.role)


class Executor(Protocol):
    """Places workers."""

    @property
    def transports(self) -> Sequence[str]:
        """Ways for the weights from trainer to generator, best first; `shm` is for workers on one host."""
        ...

    @property
    def one_process(self) -> bool:
        """Whether all workers share this process."""
        ...

    def place(self, plans: Sequence[WorkerPlan]) -> Sequence[Handle]:
        """Start all workers; a handle for each, in order; their parts have none of their own."""
        ...

    def restart(self, name: str) -> Handle:
        """Start a worker anew in the room of the one of this name, which is closed or dead.

        Raises:
            ResourceError: that room is lost, and there is no other now.
        """
        ...

    def close(self) -> None:
        """Give everything back; may be called twice."""
        ...


class LocalExecutor:
    """All workers in this process, each on a thread of its own."""

    transports = ("local",)
    one_process = True

    def __init__(self) -> None:
        self._plans: dict[str, WorkerPlan] = {}

    def place(self, plans: Sequence[WorkerPlan]) -> list[LocalHandle]:
        """See Executor."""
        self._plans |= {plan.name: plan for plan in plans}
        return [self.restart(plan.name) for plan in plans]

    def restart(self, name: str) -> LocalHandle:
        """See Executor."""
        plan = self._plans[name]
        return LocalHandle(name, lambda: plan.worker(*plan.arguments))

    def close(self) -> None:
        """Do nothing: there is nothing beyond the handles to give back."""
