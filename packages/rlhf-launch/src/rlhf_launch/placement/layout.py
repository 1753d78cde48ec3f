"""Who sits where: workers dealt to hosts and devices before anything is started, or refused with the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core import ConfigError, ResourceError

from rlhf_launch.placement.executor import WorkerPlan

_OVER_HOSTS = (
    ", or let each engine divide its pipeline stages among several hosts (placement.rollout.hosts_per_engine, "
    "with vLLM)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A host with room for workers."""

    name: str
    """Its address in the cluster, or `host 1` of an imagined one."""
    gpus: int = 0
    cpus: float = math.inf
    node: str = ""
    """Ray's id of it; empty for an imagined one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where one worker sits."""

    plan: WorkerPlan
    devices: tuple[int, ...]
    """Places in the bundle's list of GPUs; empty for a worker without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What is reserved on one host for the roles that share its devices, and who sits there."""

    host: Host
    first: int
    """The first of its GPUs, as the layout counts those of the host."""
    gpus: int
    cpus: float
    seats: tuple[Seat, ...]
    """Role by role, the workers of each in order."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that have workers here."""
        return tuple(dict.fromkeys(seat.plan.role for seat in self.seats))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where all workers of a run sit. A role's workers are in the order of its bundles: ranks follow hosts."""

    bundles: tuple[Bundle, ...]

    @property
    def shared(self) -> tuple[frozenset[str], ...]:
        """Sets of roles that sit on the same devices."""
        sets: dict[str, dict[str, None]] = {}
        for bundle in self.bundles:
            for seat in bundle.seats:
                sets.setdefault(seat.plan.devices, {})[seat.plan.role] = None
        return tuple(frozenset(roles) for roles in sets.values() if len(roles) > 1)

    def seats_of(self, role: str) -> list[tuple[Bundle, Seat]]:
        """A role's workers in order, with what each sits in."""
        return [(bundle, seat) for bundle in self.bundles for seat in bundle.seats if seat.plan.role == role]


def lay_out(plans: Sequence[WorkerPlan], hosts: Sequence[Host]) -> Layout:
    """Give every worker a host and, if it needs GPUs, devices there.

    Roles that share devices get as many as the largest of them needs; each sits on the first ones. Groups that must
    stay together (`WorkerPlan.together`, the GPUs of one engine) never straddle two hosts. A set of roles goes to
    one host if any has room, to the one that it leaves least of, else over hosts in their order. A worker and its
    parts (`WorkerPlan.parts`) sit on different hosts, those that have most left.

    Args:
        plans: all workers; those of one role alike in what they need, and in order.
        hosts: with what is free there.

    Raises:
        ResourceError: there is no room, with what is needed and what there is.
        ConfigError: roles that share devices contradict each other, or a host is named that is not there.
    """
    sets: dict[str, list[WorkerPlan]] = {}
    for plan in plans:
        sets.setdefault(plan.devices, []).extend((plan, *plan.parts))
    demands = [_Demand.of(members) for members in sets.values()]
    _check_sizes(demands, hosts)
    _check_totals(demands, hosts)
    rooms = [_Room(host=host, gpus=host.gpus, cpus=host.cpus) for host in hosts]
    placed: dict[str, list[Bundle]] = {}
    # Large units first: small ones fit into what these leave. Of equals, those that may sit in few places.
    for demand in sorted(demands, key=lambda one: (one.hosts is None, -one.unit, -one.slots)):
        placed[demand.name] = demand.place(rooms)
    return Layout(bundles=tuple(bundle for demand in demands for bundle in placed[demand.name]))


@dataclass(slots=True)
class _Room:
    """What is left of a host."""

    host: Host
    gpus: int
    cpus: float

    def holds(self, gpus: int, cpus: float) -> bool:
        return gpus <= self.gpus and cpus <= self.cpus + 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class _Demand:
    """What the roles of one set of devices need together.

    Devices are counted in slots: a GPU, or on CPUs a worker's place.
    """

    name: str
    roles: Mapping[str, Sequence[WorkerPlan]]
    unit: int
    """Slots that must be on one host: a multiple of what each role keeps together."""
    slots: int
    on_gpus: bool
    hosts: int | tuple[str, ...] | None = None
    apart: int = 1
    """Units in a row that must be on different hosts: a worker and its parts."""

    @classmethod
    def of(cls, members: Sequence[WorkerPlan]) -> _Demand:
        """The demand of all workers of one set."""
        roles: dict[str, list[WorkerPlan]] = {}
        for plan in members:
            roles.setdefault(plan.role, []).append(plan)
        on_gpus = any(plan.gpus for plan in members)
        for role, plans in roles.items():
            if on_gpus and not plans[0].gpus:
                raise ConfigError(f"{role} needs no GPU, so it cannot share those of {_others(roles, role)}")
        wishes = dict.fromkeys(plan.hosts for plan in members if plan.hosts is not None)
        if len(wishes) > 1:
            raise ConfigError(
                f"{_and(roles)} share their devices, but ask for different hosts ({_and(map(str, wishes))}); write "
                "them once"
            )
        apart = 1 + max(len(plan.parts) for plan in members)
        if apart > 1 and len(roles) > 1:
            raise ConfigError(
                f"{_and(roles)} share devices, but workers over {apart} hosts have devices of their own"
            )
        if apart > 1 and isinstance(next(iter(wishes), None), int):
            raise ConfigError(
                f"{_and(roles)}: name the hosts, or leave them out, for workers over {apart} hosts each"
            )
        return cls(
            name=members[0].devices,
            roles=roles,
            unit=math.lcm(*(plans[0].together * max(plans[0].gpus, 1) for plans in roles.values())),
            slots=max(len(plans) * max(plans[0].gpus, 1) for plans in roles.values()),
            on_gpus=on_gpus,
            hosts=next(iter(wishes), None),
            apart=apart,
        )

    @property
    def described(self) -> str:
        return _and(self.roles)

    def cpus(self, first: int, last: int) -> float:
        """Cores for the workers in slots `first` to `last`: roles that share devices take turns."""
        needs = []
        for plans in self.roles.values():
            size = max(plans[0].gpus, 1)
            needs.append(sum(plan.cpus for plan in plans[first // size : last // size]))
        return max(needs)

    def largest_group(self) -> tuple[str, int, int]:
        """The role that keeps most slots on one host, its workers among them, and the slots."""
        sizes = {role: plans[0].together * max(plans[0].gpus, 1) for role, plans in self.roles.items()}
        role = max(sizes, key=lambda name: sizes[name])
        return role, self.roles[role][0].together, sizes[role]

    def place(self, rooms: Sequence[_Room]) -> list[Bundle]:
        """Take room for everything; a bundle for each host that has some of it."""
        found: dict[str, tuple[_Room, list[tuple[int, int]]]] = {}
        for room, first, last in self._portions(rooms):
            room.gpus -= (last - first) if self.on_gpus else 0
            room.cpus -= self.cpus(first, last)
            found.setdefault(room.host.name, (room, []))[1].append((first, last))
        return [self._bundle(room, spans) for room, spans in found.values()]

    def _portions(self, rooms: Sequence[_Room]) -> list[tuple[_Room, int, int]]:
        """Which slots (from, to) go to which host."""
        allowed = self._allowed(rooms)
        if self.apart > 1:
            return self._apart(allowed)
        if isinstance(self.hosts, int):
            return self._spread(allowed, self.hosts)
        whole = [room for room in allowed if room.holds(*self._needs(0, self.slots))]
        if whole:
            room = min(whole, key=lambda one: (one.gpus, one.cpus) if self.on_gpus else (0, 0))
            return [(room, 0, self.slots)]
        portions: list[tuple[_Room, int, int]] = []
        left = {room.host.name: [room.gpus, room.cpus] for room in allowed}
        for first in range(0, self.slots, self.unit):
            last = min(first + self.unit, self.slots)
            gpus, cpus = self._needs(first, last)
            fitting = [
                room
                for room in allowed
                if gpus <= left[room.host.name][0] and cpus <= left[room.host.name][1] + 1e-6
            ]
            if not fitting:
                raise ResourceError(self._no_room(rooms, last - first))
            room = fitting[0]
            left[room.host.name][0] -= gpus
            left[room.host.name][1] -= cpus
            portions.append((room, first, last))
        return portions

    def _apart(self, rooms: Sequence[_Room]) -> list[tuple[_Room, int, int]]:
        """Each worker and its parts on the hosts that have most left, which finds room wherever there is some."""
        portions: list[tuple[_Room, int, int]] = []
        left = [[room.gpus, room.cpus] for room in rooms]
        for first in range(0, self.slots, self.unit * self.apart):
            gpus, cpus = self._needs(first, first + self.unit)
            fitting = [n for n, (free, cores) in enumerate(left) if gpus <= free and cpus <= cores + 1e-6]
            if len(fitting) < self.apart:
                size = f"{gpus} GPUs and {cpus:g} CPU" if self.on_gpus else f"{cpus:g} CPU"
                placed = first // (self.unit * self.apart)
                raise ResourceError(
                    f"{self.described}: each engine needs {size} on each of {self.apart} hosts, and after "
                    f"{placed} engine(s) {len(fitting)} host(s) have that; before them, free are "
                    f"{_free(rooms, self.on_gpus)}"
                )
            most = sorted(fitting, key=lambda n: (-left[n][0], -left[n][1]) if self.on_gpus else (-left[n][1],))
            for number, host in enumerate(sorted(most[: self.apart])):
                left[host][0] -= gpus
                left[host][1] -= cpus
                begin = first + number * self.unit
                portions.append((rooms[host], begin, begin + self.unit))
        return portions

    def _spread(self, rooms: Sequence[_Room], count: int) -> list[tuple[_Room, int, int]]:
        share = self.slots // count
        if self.slots % count or share % self.unit:
            raise ConfigError(
                f"{self.described}: {self.slots} {self._what} cannot be spread evenly over {count} hosts in groups "
                f"of {self.unit} that stay on one host; choose another number of hosts, or leave it out"
            )
        spans = [(number * share, (number + 1) * share) for number in range(count)]
        chosen = [room for room in rooms if all(room.holds(*self._needs(*span)) for span in spans)][:count]
        if len(chosen) < count:
            raise ResourceError(
                f"{self.described}: {count} hosts with {share} free {self._what} each are asked for, and "
                f"{len(chosen)} have that; free are {_free(rooms, self.on_gpus)}"
            )
        return [(room, *span) for room, span in zip(chosen, spans, strict=True)]

    def _allowed(self, rooms: Sequence[_Room]) -> list[_Room]:
        if not isinstance(self.hosts, tuple):
            return list(rooms)
        by_name = {room.host.name: room for room in rooms}
        if missing := [name for name in self.hosts if name not in by_name]:
            raise ConfigError(
                f"{self.described}: hosts names {missing[0]!r}, which is not in the cluster; there are "
                f"{', '.join(by_name)}"
            )
        return [by_name[name] for name in self.hosts]

    def _needs(self, first: int, last: int) -> tuple[int, float]:
        return (last - first) if self.on_gpus else 0, self.cpus(first, last)

    @property
    def _what(self) -> str:
        return "GPUs" if self.on_gpus else "workers"

    def _no_room(self, rooms: Sequence[_Room], size: int) -> str:
        return (
            f"{self.described}: no host has {size} {self._what} free that must be together (of {self.slots} in "
            f"all); after the roles that were placed before, free are {_free(rooms, self.on_gpus)}"
        )

    def _bundle(self, room: _Room, spans: Sequence[tuple[int, int]]) -> Bundle:
        seats: list[Seat] = []
        for plans in self.roles.values():
            size = max(plans[0].gpus, 1)
            offset = 0
            for first, last in spans:
                for number, plan in enumerate(plans[first // size : last // size]):
                    begin = offset + number * size
                    seats.append(Seat(plan=plan, devices=tuple(range(begin, begin + plan.gpus))))
                offset += last - first
        gpus = sum(last - first for first, last in spans) if self.on_gpus else 0
        return Bundle(
            host=room.host,
            # Room is taken from the front, so what was taken before this bundle comes before it.
            first=room.host.gpus - room.gpus - gpus,
            gpus=gpus,
            cpus=sum(self.cpus(first, last) for first, last in spans),
            seats=tuple(seats),
        )


def _check_sizes(demands: Sequence[_Demand], hosts: Sequence[Host]) -> None:
    """Refuse a group that no host of the cluster could hold, were it empty."""
    largest = max((host.gpus for host in hosts), default=0)
    for demand in demands:
        if not demand.on_gpus:
            continue
        role, workers, size = demand.largest_group()
        if size > largest:
            what = f"a worker of {role} needs {size} GPUs"
            if workers > 1:
                what = f"{workers} ranks of {role} must sit on one host, with {size} GPUs"
            raise ResourceError(
                f"{what}, and the largest host has {largest}: tensor, pipeline and sequence parallel groups, and "
                f"those of hpZ, stay within a host. Make them smaller{_OVER_HOSTS if role == 'rollout' else ''}"
            )
        if demand.unit > largest:
            raise ResourceError(
                f"{demand.described} share their devices in groups of {demand.unit} GPUs (the least common "
                f"multiple of what each keeps on one host), and the largest host has {largest}; "
                "make the groups divide each other"
            )


def _check_totals(demands: Sequence[_Demand], hosts: Sequence[Host]) -> None:
    """Refuse what is more than all hosts have together."""
    gpus = {demand.described: float(demand.slots) for demand in demands if demand.on_gpus}
    cpus = {demand.described: demand.cpus(0, demand.slots) for demand in demands}
    workers = sum(len(plans) for demand in demands for plans in demand.roles.values())
    for resource, needs, have in (
        ("GPU", gpus, float(sum(host.gpus for host in hosts))),
        ("CPU", cpus, sum(host.cpus for host in hosts)),
    ):
        need = sum(needs.values())
        if need > have + 1e-6:
            each = ", ".join(f"{name} {size:g}" for name, size in needs.items())
            raise ResourceError(
                f"the run needs {need:g} {resource} for {workers} workers, the cluster has {have:g}: {each}. Use "
                "fewer train.ranks or rollout.engines, let roles share devices (placement.<role>.colocate_with)"
                f"{', lower placement.cpus_per_worker' if resource == 'CPU' else ''}, or use a larger cluster"
            )


def _free(rooms: Sequence[_Room], on_gpus: bool) -> str:
    return ", ".join(
        f"{room.gpus} on {room.host.name}" if on_gpus else f"{room.cpus:g} CPU on {room.host.name}"
        for room in rooms
    )


def _others(roles: Mapping[str, object], role: str) -> str:
    return _and(name for name in roles if name != role)


def _and(names: Iterable[str]) -> str:
    words = list(names)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
