"""Who sits where, as a table for people; made without a cluster, and without loading a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_core import EngineConfig, RolloutConfig

from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.fill import filled
from rlhf_launch.placement.layout import Bundle, Host, Layout, Seat, lay_out
from rlhf_launch.placement.plans import all_training_plans, rollout_plans
from rlhf_launch.placement.resolve import ResolvedBackends, hosts_there, resolve_backends
from rlhf_launch.tables import aligned, written
from rlhf_launch.workers.devices import described_turns

_TITLES = ("role", "workers", "host", "GPUs", "in turns with", "runs", "model", "options")


def plans_of(config: OnlineConfig, backends: ResolvedBackends) -> list[WorkerPlan]:
    """All workers of a run, role by role, the rollout engines last."""
    training = all_training_plans(config, backends).values()
    rollout = rollout_plans(config, backends, adapter_rank=config.adapter_rank, weights=config.weight_sync)
    return [plan for plans in (*training, rollout) for plan in plans]


def online_plan(config: OnlineConfig, hosts: Sequence[Host] | None = None) -> str:
    """Where the workers of a run would sit, and with what options; nothing is started or loaded.

    Args:
        config: the run.
        hosts: where they would be; looked for if not given.

    Raises:
        UserError: it cannot be placed there, or an engine cannot honour its settings.
    """
    if hosts is None:
        hosts = hosts_there(config.placement.ray_address)
    config, chosen = filled(config, hosts)
    backends = resolve_backends(config, hosts=hosts)
    table = overview(plans_of(config, backends), hosts)
    return "\n".join([*([] if chosen is None else [chosen]), table, *described_turns(config.roles, config.shared)])


def overview(plans: Sequence[WorkerPlan], hosts: Sequence[Host]) -> str:
    """Who sits where, a row for each role and host; roles in the order of their workers.

    Raises:
        ResourceError: there is no room, with what is needed and what there is.
        ConfigError: see `lay_out`.
    """
    layout = lay_out(plans, hosts)
    rows = [_TITLES, *(row for role in dict.fromkeys(plan.role for plan in plans) for row in _rows(role, layout))]
    used = sum(bundle.gpus for bundle in layout.bundles)
    cpus = sum(bundle.cpus for bundle in layout.bundles)
    there = sum(host.cpus for host in hosts)
    cores = f"{cpus:g} CPU cores" if math.isinf(there) else f"{cpus:g} of {there:g} CPU cores"
    head = f"{len(hosts)} host(s), {used} of {sum(host.gpus for host in hosts)} GPUs, {cores}"
    return f"{head}\n\n{aligned(rows)}"


def _rows(role: str, layout: Layout) -> list[tuple[str, ...]]:
    turns = [sorted(members - {role}) for members in layout.shared if role in members]
    seats = layout.seats_of(role)
    heads = [seat.plan for _, seat in seats if not _part(seat)]
    numbers = {one.name: number for number, plan in enumerate(heads) for one in (plan, *plan.parts)}
    by_bundle: dict[tuple[int, int], tuple[Bundle, list[Seat]]] = {}
    for bundle, seat in seats:
        by_bundle.setdefault((id(bundle), _part(seat)), (bundle, []))[1].append(seat)
    return [
        (
            role,
            _ranges(numbers[seat.plan.name] for seat in here) + _said_part(here[0]),
            bundle.host.name,
            _devices(bundle, here),
            ", ".join(turns[0]) if turns else "",
            here[0].plan.arguments[0],
            here[0].plan.arguments[1].model,
            _options(here[0].plan.arguments[1]),
        )
        for bundle, here in by_bundle.values()
    ]


def _part(seat: Seat) -> int:
    """Which part of an engine over several hosts it is; 0 for what is no part of another."""
    return getattr(seat.plan.arguments[1], "host", 0)


def _said_part(seat: Seat) -> str:
    hosts = getattr(seat.plan.arguments[1], "hosts", 1)
    return f" (part {_part(seat) + 1} of {hosts})" if hosts > 1 else ""


def _devices(bundle: Bundle, seats: Sequence[Seat]) -> str:
    """The GPUs of a role on a host: a range, or one for each engine."""
    if len(seats[0].devices) <= 1:
        return _ranges(bundle.first + device for seat in seats for device in seat.devices)
    return " ".join(_ranges(bundle.first + device for device in seat.devices) for seat in seats)


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order, those in a row as one range: 0-3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts) or "-"


def _options(config: EngineConfig | RolloutConfig) -> str:
    """What an engine is told about how it runs: sizes of its groups, and its own options."""
    shown: dict[str, Any] = {"device": config.device, "dtype": config.dtype}
    names = ("sequence_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    shown |= {name: size for name in names if (size := getattr(config, name, 1)) != 1}
    return written({**shown, **config.options})
