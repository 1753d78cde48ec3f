"""Engines that share devices take turns: who is at work has their memory, the others have left it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlhf_launch.config.placement import REWARD, TEACHER

ROLLOUT = "rollout"
"""The name of all rollout engines together, beside those of the training engines."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def in_turn(turn: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Callable[[_Method], _Method]:
    """Decorate methods that run within a turn on shared devices, which `turn` gives for their object."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def taking_a_turn(self: Any, *args: Any, **settings: Any) -> Any:
            with turn(self):
                return method(self, *args, **settings)

        return taking_a_turn  # type: ignore[return-value]

    return decorate


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """How an engine leaves its devices' memory, and how it comes back with all that it had."""

    leave: Callable[[], None]
    come: Callable[[], None]


class SharedDevices:
    """The devices of a run, as far as several engines share them.

    An engine says when it is `at_work`; before that, whoever shares devices with it leaves their memory, as soon as
    that one's own turn is over. An engine that has left comes back when its turn is. Engines that are needed
    together, as both ends of a weight sync, say so together; if one of them is at work already, the others join it.
    Engines with devices of their own never leave.

    Any thread may ask. Turns may be nested: what an outer turn needs stays.

    >>> devices = SharedDevices([frozenset({"policy", "reference"})])
    >>> for name in ("policy", "reference"):
    ...     with devices.moving_in(name, Tenant(leave=lambda name=name: print(name, "leaves"), come=lambda: None)):
    ...         print(name, "loads its model")
    policy loads its model
    policy leaves
    reference loads its model
    >>> with devices.at_work("policy"):
    ...     sorted(devices.present)
    reference leaves
    ['policy']
    """

    def __init__(self, shared: Sequence[Collection[str]] = ()) -> None:
        self._shared = [frozenset(names) for names in shared if len(names) > 1]
        self._tenants: dict[str, Tenant] = {}
        self._present: set[str] = set()
        self._working: dict[str, list[int]] = {}
        """The threads that hold a turn of each engine."""
        self._changed = threading.Condition(threading.RLock())

    @property
    def shared(self) -> tuple[frozenset[str], ...]:
        """The names of those that share devices with each other."""
        return tuple(self._shared)

    @property
    def present(self) -> frozenset[str]:
        """Those that have memory on their devices now."""
        return frozenset(self._present)

    def neighbours(self, name: str) -> frozenset[str]:
        """Those that share devices with an engine."""
        return frozenset().union(*(names for names in self._shared if name in names)) - {name}

    @contextlib.contextmanager
    def moving_in(self, name: str, tenant: Tenant) -> Iterator[None]:
        """A block in which an engine comes up for the first time, after its neighbours have left."""
        with self.at_work(name):
            yield
            with self._changed:
                self._tenants[name] = tenant
                self._present.add(name)

    @contextlib.contextmanager
    def at_work(self, *names: str) -> Iterator[None]:
        """Inside the block the named engines have their devices' memory; their neighbours wait for its end.

        Raises:
            RuntimeError: this thread holds a turn of a neighbour, whose end it would wait for in vain.
        """
        me = threading.get_ident()
        with self._changed:
            while neighbour := self._in_the_way(names):
                if me in self._working[neighbour]:
                    raise RuntimeError(f"{neighbour} is at work, and cannot make way for {', '.join(names)}")
                self._changed.wait()
            self._make_way(names)
            for name in names:
                self._working.setdefault(name, []).append(me)
        try:
            yield
        finally:
            with self._changed:
                for name in names:
                    self._working[name].remove(me)
                self._changed.notify_all()

    def _in_the_way(self, names: Sequence[str]) -> str | None:
        """A neighbour that is at work, if none of the named engines is."""
        if any(self._working.get(name) for name in names):
            return None
        others = sorted(frozenset().union(*map(self.neighbours, names)) - set(names))
        return next((other for other in others if self._working.get(other)), None)

    def _make_way(self, names: Sequence[str]) -> None:
        """Let the neighbours leave that are not at work, then let the named engines come."""
        for name in names:
            for other in sorted(self.neighbours(name) & self._present - set(names)):
                if not self._working.get(other):
                    self._present.discard(other)
                    self._tenants[other].leave()
        for name in names:
            if name in self._tenants and name not in self._present:
                self._tenants[name].come()
                self._present.add(name)


def turns_by_phase(roles: Sequence[str], shared: Sequence[Collection[str]]) -> dict[str, list[list[str]]]:
    """Who has memory on the shared devices in each phase of a step: turn after turn, those that are there at once.

    Rewards are scored while samples arrive, so their models are needed together with the rollout engines.

    Args:
        roles: of the run: `policy`, `critic`, `reference`, teachers, reward models by name, `rollout`.
        shared: sets of those that share devices.

    >>> roles = ["policy", "critic", "reference", "reward model", "rollout"]
    >>> turns_by_phase(roles, [{"policy", "reference"}, {"critic", "reward model"}])["score"]
    [['policy', 'critic'], ['reference']]
    """
    sharing = set[str]().union(*shared)
    teachers = [role for role in roles if role == "teacher" or role.startswith(TEACHER)]
    training = [role for role in ("policy", "reference", *teachers, "critic") if role in roles]
    samplers = [role for role in roles if role == ROLLOUT or role.startswith(REWARD)]
    phases = {
        "generate": [samplers],
        "score": in_turns(training, shared),
        "train": in_turns([role for role in ("critic", "policy") if role in roles], shared),
        "sync": [["policy", ROLLOUT]],
    }
    kept = {name: [[role for role in turn if role in sharing] for turn in turns] for name, turns in phases.items()}
    return {name: found for name, turns in kept.items() if (found := [turn for turn in turns if turn])}


def described_turns(roles: Sequence[str], shared: Sequence[Collection[str]]) -> list[str]:
    """`turns_by_phase` as lines for people; none where nobody shares devices."""
    return [
        f"on shared devices, {phase}: {', then '.join(' with '.join(turn) for turn in turns)}"
        for phase, turns in turns_by_phase(roles, shared).items()
    ]


def in_turns(roles: Sequence[str], shared: Sequence[Collection[str]]) -> list[list[str]]:
    """Roles in turns: those of one turn have devices of their own and may work at the same time.

    Args:
        roles: each takes the first turn in which none shares a device with it.
        shared: sets of roles that share devices.

    >>> in_turns(["policy", "reference", "critic"], [{"policy", "reference"}])
    [['policy', 'critic'], ['reference']]
    """
    turns: list[list[str]] = []
    for role in roles:
        beside = set[str]().union(*(names for names in shared if role in names))
        free = next((turn for turn in turns if beside.isdisjoint(turn)), None)
        if free is None:
            turns.append([role])
        else:
            free.append(role)
    return turns
