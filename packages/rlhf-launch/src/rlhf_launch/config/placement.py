"""The `placement` section of a run's configuration: which role sits where, on how much, and with whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlhf_algos import PlacementSection
from rlhf_core import ConfigError, check_whole

REWARD = "reward "
"""Beginning of the name that a reward part's engine has among the roles of a run: `reward helpful`."""
TEACHER = "teacher "
"""Beginning of the name that one of several teachers has among the roles of a run: `teacher math`."""
_GROUPS = {"reward": REWARD, "teachers": TEACHER}
"""Keys of roles that are several, and how their names begin in a run."""
_ROLES = ("policy", "critic", "reference", "teacher", "rollout")


def is_training(role: str) -> bool:
    """Whether a role of a run takes part in training: all but the generator and the models of rewards."""
    return role != "rollout" and not role.startswith(REWARD)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePlacement:
    """Where the workers of one role sit."""

    gpus: int | None = None
    """GPUs of one worker; null for one a training rank, and tensor x pipeline parallel ones a rollout engine. 0 is
    for workers that need none (a backend that asks a server)."""
    cpus: float | None = None
    """CPU cores reserved per worker; null for `placement.cpus_per_worker`."""
    colocate_with: str | None = None
    """A role whose devices this one shares (`policy`, `critic`, `reference`, `teacher`, `teachers.<name>`,
    `rollout`, `reward.<part>`); the roles take turns there. Null for devices of its own."""
    hosts: int | tuple[str, ...] | None = None
    """How many hosts the workers are spread over evenly, or which (addresses, as Ray knows them); null for as few
    hosts as have room."""

    def __post_init__(self) -> None:
        if self.gpus is not None:
            check_whole("placement: gpus of a worker", self.gpus, at_least=0)
        if self.cpus is not None and not self.cpus >= 0:
            raise ConfigError(f"placement: cpus of a worker must not be negative, got {self.cpus}")
        if isinstance(self.hosts, int):
            check_whole("placement: hosts of a role", self.hosts, at_least=1)
        elif self.hosts is not None and not self.hosts:
            raise ConfigError("placement: hosts of a role is empty; name hosts, give their number, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlacement(RolePlacement):
    """Where the rollout engines sit."""

    hosts_per_engine: int = 1
    """Hosts among which each engine divides its pipeline stages, evenly; the GPUs of a stage
    (`rollout.tensor_parallel_size`) stay on one. Above 1 for vLLM on Ray, with devices of its own; `gpus` and
    `cpus` are then those of an engine on each of its hosts."""

    def __post_init__(self) -> None:
        RolePlacement.__post_init__(self)
        check_whole("placement: hosts_per_engine of rollout", self.hosts_per_engine, at_least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlacement(RolePlacement):
    """Where a training engine sits that has no section of its own: the critic, the reference, the teacher, a reward
    model."""

    ranks: int | None = None
    """Ranks of the engine; null for `train.ranks` (for a reward model: 1)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Engine options of this role alone; laid over `train.options`, unless the role has another engine."""

    def __post_init__(self) -> None:
        RolePlacement.__post_init__(self)
        if self.ranks is not None:
            check_whole("placement: ranks of a role", self.ranks, at_least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlinePlacementSection(PlacementSection):
    """Where the work runs, role by role.

    How many workers the policy and the generator have, and with which options, is said where they are described
    (`train.ranks`, `train.options`; `rollout.engines`, `rollout.options`); the roles that have no section of their
    own say it here.
    """

    layout: Literal["auto", "written"] = "auto"
    """`written`: as many workers as the file says, each role on devices of its own unless `colocate_with` says
    otherwise. `auto`: the same, except that a file that says nothing of numbers and places gets a layout that fills
    the GPUs that there are (docs/placement.md)."""
    check_memory: Literal["refuse", "print", "off"] = "refuse"
    """Before it starts, a run says what memory it will need. `refuse`: it does not start where its GPUs are too
    small by more than the plan may be off (docs/plan.md). `print`: it does. `off`: nothing is planned."""
    policy: RolePlacement = field(default_factory=RolePlacement)
    """The trained model; `train.ranks` of it."""
    critic: EnginePlacement = field(default_factory=EnginePlacement)
    """The critic, where the algorithm has one."""
    reference: EnginePlacement = field(default_factory=EnginePlacement)
    """The reference, where the algorithm measures KL. With adapters it is the policy with its adapters off, and has
    no workers."""
    teacher: EnginePlacement = field(default_factory=EnginePlacement)
    """The teacher of on-policy distillation."""
    teachers: Mapping[str, EnginePlacement] = field(default_factory=dict)
    """Several teachers, by the names that `model.teachers` gives them."""
    rollout: RolloutPlacement = field(default_factory=RolloutPlacement)
    """The generator; `rollout.engines` of it."""
    reward: Mapping[str, EnginePlacement] = field(default_factory=dict)
    """Reward models, by the name of their part; the short form `reward.model` has the name `model`."""

    def __post_init__(self) -> None:
        PlacementSection.__post_init__(self)
        for name, role in self.roles():
            if role.colocate_with is not None:
                other = _role_name(role.colocate_with)
                if other == name:
                    raise ConfigError(f"placement: {key_of(name)} is colocated with itself; name another role")
                if other not in _ROLES and not other.startswith((REWARD, TEACHER)):
                    raise ConfigError(
                        f"placement: {key_of(name)}: colocate_with={role.colocate_with!r} is no role; write "
                        "policy, critic, reference, teacher, teachers.<name>, rollout or reward.<part>"
                    )

    def of(self, role: str) -> RolePlacement:
        """What is written of a role, by its name in a run (`policy`, `reward helpful`)."""
        if role.startswith(REWARD):
            return self.reward.get(role.removeprefix(REWARD)) or EnginePlacement()
        if role.startswith(TEACHER):
            return self.teachers.get(role.removeprefix(TEACHER)) or EnginePlacement()
        return dict(self.roles())[role]

    def roles(self) -> Iterator[tuple[str, RolePlacement]]:
        """Every role that can be written of, by its name in a run."""
        yield from (("policy", self.policy), ("critic", self.critic))
        yield from (("reference", self.reference), ("teacher", self.teacher), ("rollout", self.rollout))
        yield from ((TEACHER + name, role) for name, role in self.teachers.items())
        yield from ((REWARD + part, role) for part, role in self.reward.items())

    def partners(self) -> dict[str, str]:
        """The role that each colocated role names, by names in a run."""
        written = ((name, role.colocate_with) for name, role in self.roles())
        return {name: _role_name(other) for name, other in written if other is not None}

    def sharing(self, role: str, partner: str) -> OnlinePlacementSection:
        """The same, with a role on the devices of another."""
        return self.with_role(role, replace(self.of(role), colocate_with=key_of(partner)))

    def with_role(self, role: str, placed: RolePlacement) -> OnlinePlacementSection:
        """The same, with a role placed so."""
        for group, beginning in _GROUPS.items():
            if role.startswith(beginning):
                return replace(self, **{group: {**getattr(self, group), role.removeprefix(beginning): placed}})
        return replace(self, **{role: placed})

    def of_one_process(self, device: Literal["cpu", "cuda"]) -> OnlinePlacementSection:
        """The same, with every role in this process, which has one rank of each; engine options stay."""
        alone = {
            name: replace(EnginePlacement(), options=role.options)
            if isinstance(role, EnginePlacement)
            else type(role)()
            for name, role in self.roles()
            if not name.startswith((REWARD, TEACHER))
        }
        return replace(
            self,
            executor="local",
            device=device,
            layout="written",
            reward={},
            teachers={name: replace(EnginePlacement(), options=one.options) for name, one in self.teachers.items()},
            **alone,  # type: ignore[arg-type]
        )

    @property
    def says_nothing_of_roles(self) -> bool:
        """Whether every role is left to its defaults."""
        return all(role == type(role)() for _, role in self.roles())


def shared_roles(
    placement: OnlinePlacementSection, roles: tuple[str, ...], *, others_alone: bool = False
) -> tuple[frozenset[str], ...]:
    """Sets of roles that sit on the same devices, two or more each, in the order of `roles`.

    Args:
        placement: who sits with whom.
        roles: the roles of the run, by name (`policy`, `critic`, `reference`, `teacher`, `teacher <name>`,
            `reward <part>`, `rollout`).
        others_alone: pass over partners that the run does not have, rather than refuse them.

    Raises:
        ConfigError: a role is to sit with one that the run does not have.
    """
    sets = {role: {role} for role in roles}
    for role, partner in placement.partners().items():
        if role not in sets or (others_alone and partner not in sets):
            continue
        if partner not in sets:
            raise ConfigError(
                f"placement.{key_of(role)}.colocate_with: this run has no workers for {key_of(partner)}; there are "
                f"{', '.join(map(key_of, roles))}"
            )
        joined = sets[role] | sets[partner]
        for member in joined:
            sets[member] = joined
    found = dict.fromkeys(frozenset(sets[role]) for role in roles)
    return tuple(members for members in found if len(members) > 1)


def _role_name(key: str) -> str:
    """The name in a run of a role that a file names: `reward helpful` for `reward.helpful`."""
    group, _, part = key.partition(".")
    return f"{_GROUPS[group]}{part}" if group in _GROUPS and part else key


def key_of(role: str) -> str:
    """How a file names a role."""
    for group, beginning in _GROUPS.items():
        if role.startswith(beginning):
            return f"{group}.{role.removeprefix(beginning)}"
    return role
