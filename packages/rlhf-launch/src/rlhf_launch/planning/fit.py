"""Whether a run fits: what each role holds on a device in each phase, and what all do that share the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rlhf_core import MOST_TOKENS, ConfigError, EngineConfig, ImaginedModel, RolloutConfig, cache_bytes_per_token

from rlhf_launch.config.placement import REWARD
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.plans import all_training_plans, rollout_plans
from rlhf_launch.placement.resolve import ResolvedBackends
from rlhf_launch.planning.devices import Device
from rlhf_launch.planning.memory import EnginePlan, EnginePlanner, KnownModels
from rlhf_launch.planning.trial_batch import RowShape
from rlhf_launch.workers.devices import turns_by_phase

ERROR = 0.15
"""How far a planned peak may be off: `benchmarks/plan_memory.py` shows 8 % at most on CPUs, and a GPU's allocator
has gaps between its blocks."""
_SHARED_UTILIZATION = 0.7
_UTILIZATION = 0.9
"""Of a device's memory, for an engine alone there: vLLM's own default."""
PHASES = ("generation", "scoring", "training", "weight sync")
_TURNS: Mapping[str, str] = dict(zip(PHASES, ("generate", "score", "train", "sync"), strict=True))
"""Their names in `turns_by_phase`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """Memory of a rollout engine on each of its devices."""

    weights: int
    budget: int
    """What the engine may use, weights and cache together."""
    link: int = 0
    """Its end of a weight link (`RolloutConfig.weight_buffer_bytes`), which the engine leaves free."""
    cache_tokens: int
    """Tokens whose keys and values have room in all its devices together."""
    longest: int
    """Tokens of the longest sample."""

    @property
    def at_once(self) -> float:
        """Longest samples that have room at the same time."""
        return self.cache_tokens / self.longest


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleFit:
    """One role: its workers, and bytes on a device in each phase."""

    role: str
    workers: int
    devices: str
    """Names the set of roles on the same devices."""
    phases: Mapping[str, int]
    host: int = 0
    """Bytes in host memory for each worker, where states are offloaded or the role has left its device."""
    engine: EnginePlan | None = None
    rollout: RolloutPlan | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetFit:
    """The devices of roles that share them: the most that is there in each phase."""

    roles: tuple[str, ...]
    phases: Mapping[str, int]

    @property
    def phase(self) -> str:
        """The phase with the most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> int:
        """Bytes of that phase."""
        return self.phases[self.phase]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFit:
    """A whole run."""

    device: Device | None
    """None if nothing is known of it: then there is no verdict."""
    on_gpus: bool
    roles: tuple[RoleFit, ...]
    sets: tuple[SetFit, ...] = field(default=())

    @property
    def too_large(self) -> tuple[SetFit, ...]:
        """Devices that need more than there is, by more than the plan may be off. Never hosts' memory."""
        if self.device is None or not self.on_gpus:
            return ()
        return tuple(one for one in self.sets if one.peak * (1 - ERROR) > self.device.memory)

    @property
    def close(self) -> tuple[SetFit, ...]:
        """Devices that may or may not have room. That a rollout engine alone keeps to its share is no guess."""
        if self.device is None or not self.on_gpus:
            return ()
        return tuple(
            one
            for one in self.sets
            if one not in self.too_large
            and one.peak * (1 if one.roles == ("rollout",) else 1 + ERROR) > self.device.memory
        )


def fit_run(
    config: OnlineConfig, backends: ResolvedBackends, device: Device | None, known: KnownModels | None = None
) -> RunFit:
    """Plan the memory of all roles.

    Args:
        config: the run; its layout filled already.
        backends: its parts.
        device: what the workers sit on; None if it is not known.
        known: models that were imagined before.

    Raises:
        ConfigError: the configuration of a model is not at hand.
    """
    known = known or KnownModels()
    on_gpus = backends.device == "cuda"
    rows = row_shape(config)
    training = all_training_plans(config, backends)
    roles = [
        training_role(
            role,
            EnginePlanner(engine_config(plans), ranks=len(plans), rows=rows, recipe=config.recipe, known=known),
            device,
            devices=plans[0].devices,
        )
        for role, plans in training.items()
    ]
    rollout = rollout_plans(config, backends, adapter_rank=config.adapter_rank, weights=config.weight_sync)
    its = rollout[0].arguments[1]
    one = rollout_role(its, known.of_rollout(its), rows, device if on_gpus else None)
    shared = on_gpus and its.shares_devices
    roles.append(
        replace(
            one,
            workers=len(rollout),
            devices=rollout[0].devices,
            host=one.rollout.weights if shared and one.rollout is not None else 0,
        )
    )
    bucket = 2 * config.weight_sync.bucket_bytes
    sets = device_sets(roles, device, on_gpus=on_gpus, bucket=bucket)
    return RunFit(device=device, on_gpus=on_gpus, roles=tuple(roles), sets=sets)


def row_shape(config: OnlineConfig) -> RowShape:
    """The longest rows of a run; an episode counts as half a prompt."""
    response = config.rollout.sampling.max_tokens
    prompt = max(1, config.max_length - response)
    return RowShape(prompt=prompt, response=response)


def micro_batch(setting: int | Literal["auto"]) -> int:
    """Tokens of the largest micro-batch; `auto` takes what fits, at most so many."""
    return MOST_TOKENS if setting == "auto" else setting


def engine_config(plans: Sequence[WorkerPlan]) -> EngineConfig:
    """What the ranks of a training engine are told."""
    found = plans[0].arguments[1]
    if not isinstance(found, EngineConfig):
        raise ConfigError(f"plan: {plans[0].role} is no training engine")
    return found


def training_role(role: str, planner: EnginePlanner, device: Device | None, *, devices: str) -> RoleFit:
    """The memory of a training engine's ranks."""
    overhead = 0 if device is None else device.overhead
    config = planner.config
    tokens = micro_batch(config.max_tokens_per_micro_batch)
    plan, note = planner.plan(tokens), ""
    if config.max_tokens_per_micro_batch == "auto":
        least = planner.plan(1)
        room = None if device is None else device.memory * 0.85 - overhead
        if room is not None and max(plan.step, plan.score) > room:
            plan, note = least, "auto: fewer tokens than the most"
    held = plan.resident + overhead
    phases = {"generation": held, "scoring": plan.score + overhead, "training": held, "weight sync": held}
    if config.trained:
        phases["training"] = plan.step + overhead
    return RoleFit(
        role=role,
        workers=planner.ranks,
        devices=devices,
        phases=phases,
        host=plan.states.host,
        engine=plan,
        note=plan.reason or note,
    )


def rollout_role(config: RolloutConfig, model: ImaginedModel, rows: RowShape, device: Device | None) -> RoleFit:
    """The memory of one rollout engine on each of its devices.

    Args:
        config: of the engine.
        model: what it generates with.
        rows: the longest there can be.
        device: the GPU; None for an engine on CPUs or on devices of which nothing is known.
    """
    ways = config.tensor_parallel_size * config.pipeline_parallel_size
    weights = sum(one.bytes for one in model.parameters) // ways
    default = _SHARED_UTILIZATION if config.shares_devices else _UTILIZATION
    share = float(config.options.get("gpu_memory_utilization", default))
    cached = cache_bytes_per_token(model.text, config.dtype, layers=model.layers)
    plan = None
    if device is not None:
        budget = int(device.memory * share) - config.weight_buffer_bytes
        # Activations of a prefill and graphs, as vLLM's own profile finds them, about.
        room = max(0, budget - weights - (2 << 30))
        plan = RolloutPlan(
            weights=weights,
            budget=budget,
            link=config.weight_buffer_bytes,
            cache_tokens=room * ways // cached,
            longest=rows.length,
        )
    there = max(weights + (0 if plan is None else 2 << 30), 0 if plan is None else plan.budget)
    if plan is not None and plan.at_once < 1:
        there = int(weights + (2 << 30) + cached * rows.length / ways)
    there += config.weight_buffer_bytes
    return RoleFit(
        role="rollout",
        workers=1,
        devices="rollout",
        phases=dict.fromkeys(PHASES, there),
        rollout=plan,
    )


def device_sets(
    roles: Sequence[RoleFit], device: Device | None, *, on_gpus: bool, bucket: int
) -> tuple[SetFit, ...]:
    """The sets of roles on the same devices, with `bucket` bytes more where weights are sent from."""
    by_devices: dict[str, list[RoleFit]] = {}
    for role in roles:
        by_devices.setdefault(role.devices, []).append(role)
    overhead = 0 if device is None else device.overhead
    found = []
    for members in by_devices.values():
        phases = {name: _together(name, members, on_gpus, overhead) for name in PHASES}
        # A rollout engine on a GPU of its own has room for its end of the link all the time.
        ends = ("policy",) if on_gpus else ("policy", "rollout")
        if any(one.role in ends for one in members):
            phases["weight sync"] += bucket
        found.append(SetFit(roles=tuple(one.role for one in members), phases=phases))
    return tuple(found)


def _together(phase: str, members: Sequence[RoleFit], on_gpus: bool, overhead: int) -> int:
    """Bytes of one device: roles that share a GPU take turns, those that wait are in host memory."""
    if len(members) == 1:
        return members[0].phases[phase]
    names = [one.role for one in members]
    there = {role for turn in turns_by_phase(names, [names]).get(_TURNS[phase], ()) for role in turn}
    here = [one for one in members if one.role in there]
    away = len(members) - len(here)
    if not on_gpus:
        return max(one.phases[phase] for one in members)
    if phase in ("scoring", "training"):
        # One at a time; contexts of the others stay.
        top = max((one.phases[phase] for one in here), default=0)
        return top + overhead * (len(members) - 1)
    return sum(one.phases["scoring" if one.role.startswith(REWARD) else phase] for one in here) + overhead * away
