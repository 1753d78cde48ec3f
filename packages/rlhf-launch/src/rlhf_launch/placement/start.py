"""The start of a run's workers: placed together, started in order, closed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rlhf_algos import PlacementSection, can_begin_again

from rlhf_launch.config.placement import REWARD
from rlhf_launch.placement.executor import Executor, LocalExecutor, WorkerPlan
from rlhf_launch.placement.ray import RayCluster
from rlhf_launch.placement.ray_address import cluster_address, worker_env_vars
from rlhf_launch.placement.resolve import ResolvedBackends, WorkerNeeds
from rlhf_launch.tables import written
from rlhf_launch.workers.devices import ROLLOUT, SharedDevices
from rlhf_launch.workers.handles import CLOSE_TIMEOUT_S, close_workers
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.waits import Waits

_LOST_S = 3.0
"""Seconds that workers have to close when one of them is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The workers of a run, all of them up."""

    training: Mapping[str, TrainGroup]
    """The ranks of each training engine, by the name that its plans were given under."""
    pool: RolloutPool
    """The rollout engines."""
    executor: Executor
    """What placed them; it starts replacements."""


def open_executor(
    kind: str, *, device: str = "cpu", placement: PlacementSection | None = None, step_tokens: int = 0
) -> Executor:
    """The executor of a kind: `local` or `ray`.

    Args:
        kind: `local` keeps all workers in this process, `ray` makes each an actor.
        device: `cuda` or `cpu`; decides how weights can travel.
        placement: which cluster is joined or started, how long to wait for room in it, and what its workers know of
            this process and of the network.
        step_tokens: see RayCluster.
    """
    if kind == "local":
        return LocalExecutor()
    placement = placement or PlacementSection()
    transports = ("ipc", "nccl", "gloo") if device.startswith("cuda") else ("shm", "gloo")
    address = cluster_address(placement.ray_address)
    return RayCluster(
        address,
        transports=transports,
        timeout_s=placement.timeout_s,
        env_vars=worker_env_vars(placement, joined=address is not None),
        step_tokens=step_tokens,
    )


def executor_of(config: WorkerNeeds, backends: ResolvedBackends, *, step_tokens: int = 0) -> Executor:
    """The executor that a configuration names; for `step_tokens` see RayCluster."""
    return open_executor(
        backends.executor, device=backends.device, placement=config.placement, step_tokens=step_tokens
    )


@contextmanager
def start_workers(
    executor: Executor,
    training: Mapping[str, Sequence[WorkerPlan]],
    rollout: Sequence[WorkerPlan],
    *,
    waits: Waits | None = None,
    devices: SharedDevices | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Workers]:
    """Place all workers in one go and start them; workers and executor are closed when the block ends.

    Args:
        executor: where they are placed.
        training: the ranks of each training engine, by its name (see `rank_plans`).
        rollout: the rollout engines (see `engine_plans`); none where nothing is generated.
        waits: how every wait on these workers is made.
        devices: which of them take turns, being on the same devices; they also start one after the other.
        say: is told, a line each, what is up and how long that took.

    Raises:
        ResourceError: there is no room for them.
    """
    waits = waits or Waits()
    devices = devices or SharedDevices()
    with ExitStack() as stack:
        stack.callback(executor.close)
        handles = list(executor.place([*(plan for plans in training.values() for plan in plans), *rollout]))
        groups: dict[str, TrainGroup] = {}
        for name, plans in training.items():
            ranks, handles = handles[: len(plans)], handles[len(plans) :]
            groups[name] = TrainGroup(name, ranks, waits=waits, devices=devices)
        scorers = [name for name in groups if name.startswith(REWARD)]
        pool = RolloutPool(handles, waits=waits, devices=devices, scorers=scorers)

        workers = Workers(training=groups, pool=pool, executor=executor)
        stack.push(lambda kind, error, trace: _close(workers, error))
        if not executor.one_process:
            waits.rescue = pool.end_stuck
            # Engines start while the training ranks do, unless these are on their devices. Within one process
            # DeepSpeed must come first: it has to make torch's process group before vLLM does.
            if not devices.neighbours(ROLLOUT):
                pool.begin()
        for name, group in groups.items():
            say(f"{name}: {group.ranks} rank(s), {group.start():.1f} s")
        if pool.engines:
            say(f"rollout: {pool.engines} engine(s), {pool.start():.1f} s")
        if pool.engines and pool.settings:
            say(f"each of them: {written(pool.settings)}")
        yield workers


def _close(workers: Workers, error: BaseException | None) -> None:
    """Close all workers under one deadline; those of one process one engine after the other.

    After the loss of a worker the deadline is short: its peers wait for it in vain, in a collective, say.
    """
    pool, training = workers.pool, reversed(list(workers.training.values()))
    engines = [pool.handles, *(group.handles for group in training)]
    everyone = [handle for handles in engines for handle in handles]
    pool.waits.leave(everyone)
    timeout_s = _LOST_S if can_begin_again(error) else CLOSE_TIMEOUT_S
    for handles in engines if workers.executor.one_process else [everyone]:
        close_workers(handles, timeout_s=timeout_s)
