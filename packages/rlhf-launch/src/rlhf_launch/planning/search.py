"""The best layout of a run on given GPUs: candidates are priced, and the fastest that fit planned as runs are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_core import TRAIN_ENGINES, ConfigError, UserError, load_plugin

from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement.layout import Host, lay_out
from rlhf_launch.placement.overview import plans_of
from rlhf_launch.placement.plans import all_training_plans, rollout_plans, weight_buffer_bytes
from rlhf_launch.placement.resolve import ResolvedBackends, resolve_backends
from rlhf_launch.planning.calibration import Calibration, predicted, published_calibration
from rlhf_launch.planning.candidates import (
    Candidate,
    Grouping,
    Room,
    Training,
    applied,
    device_sets_of,
    layouts,
    trainings,
    unit_of,
)
from rlhf_launch.planning.devices import Device
from rlhf_launch.planning.fit import (
    RoleFit,
    RunFit,
    device_sets,
    engine_config,
    rollout_role,
    row_shape,
    training_role,
)
from rlhf_launch.planning.memory import EnginePlanner, KnownModels
from rlhf_launch.planning.report import RunPlan, plan_run
from rlhf_launch.planning.timing import micro_tokens, step_work
from rlhf_launch.planning.work import StepWork

_ALIKE = 1.02
"""Layouts of one grouping whose steps differ by less are one layout for people."""
_OF_EACH = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundLayout:
    """A layout that fits, as it would be planned for itself."""

    candidate: Candidate
    config: OnlineConfig
    plan: RunPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What a search found."""

    tried: int
    """Layouts that were priced."""
    too_large: int
    """Of those that were looked at, fastest first, how many do not fit."""
    found: tuple[FoundLayout, ...]
    """The best few, the fastest first."""
    written: RunPlan | None
    """The layout of the file; None if it cannot be placed."""
    why_not: str = ""
    """Why it cannot."""


class Searcher:
    """Prices layouts of one run on one kind of GPU, without a plan of each: what they share is computed once."""

    def __init__(
        self, config: OnlineConfig, hosts: Sequence[Host], device: Device, calibration: Calibration | None = None
    ) -> None:
        """Of a run.

        Args:
            config: the run; what it says of numbers and places is one layout among others.
            hosts: where it would be.
            device: their GPUs.
            calibration: of the seconds; the published one if not given.

        Raises:
            ConfigError: there are no GPUs, or the engine has one rank.
        """
        self.config, self.hosts, self.device = config, hosts, device
        self.calibration = calibration or published_calibration()
        self.known = KnownModels()
        self.host_gpus = max((host.gpus for host in hosts), default=0)
        self.backends = resolve_backends(config, hosts=hosts)
        if not self.host_gpus or self.backends.device != "cuda":
            raise ConfigError(
                "plan --search: layouts are searched for GPUs, and there are none; give --gpus-per-host and "
                "--device, and let placement.device be auto or cuda"
            )
        self._base = applied(config, self._smallest())
        self._configs = {
            role: engine_config(plans) for role, plans in all_training_plans(self._base, self.backends).items()
        }
        if sum(host.gpus for host in hosts) > 1:
            self._check_several_ranks()
        self._rows = row_shape(config)
        self._roles: dict[tuple[str, int, Training], RoleFit] = {}
        self._rollouts: dict[tuple[int, bool], RoleFit] = {}
        first = Training(offload=False, tokens=self._rows.length, checkpointing=True)
        roles = [self._training_role(role, self.unit, first) for role in self._configs]
        fit = RunFit(device=device, on_gpus=True, roles=(*roles, self._rollout_role(1, False)))
        self._work = step_work(self._base, fit, host_gpus=self.host_gpus)

    @property
    def unit(self) -> int:
        """Ranks that must stay together."""
        return unit_of(self.config)

    def _smallest(self) -> Candidate:
        how = trainings(self.config, 1)[0]
        ranks = dict.fromkeys((role for role in self.config.roles if role != "rollout"), self.unit)
        return Candidate(grouping="separate", ranks=ranks, engines=1, tensor_parallel=1, training=how)

    def _check_several_ranks(self) -> None:
        can = load_plugin(TRAIN_ENGINES, self.backends.engine).capabilities(self._configs["policy"])
        if not can.several_ranks:
            raise ConfigError(
                f"plan --search: the engine {self.backends.engine} has one rank, so there is no layout to choose; "
                "write train.engine=deepspeed"
            )

    def candidates(self) -> list[Candidate]:
        """All that there are."""
        text = self.known.model(self._configs["policy"]).text
        room = Room(
            gpus=sum(host.gpus for host in self.hosts),
            host_gpus=min(host.gpus for host in self.hosts if host.gpus),
            together=self.unit,
            heads=text.num_attention_heads,
            stages=self.config.rollout.pipeline_parallel_size,
        )
        ways = trainings(self.config, self._rows.length)
        return [
            Candidate(grouping=grouping, ranks=ranks, engines=engines, tensor_parallel=size, training=how)
            for grouping, ranks, engines, size in layouts(self.config, room)
            for how in ways
        ]

    def seconds(self, one: Candidate) -> float:
        """Of a step, moves of roles that take turns aside: these follow from the memory."""
        return predicted(self._work_of(one), self.device, self.calibration)["step"].value

    def _work_of(self, one: Candidate) -> StepWork:
        names = _names(one, self.config)
        size = one.tensor_parallel * self.config.rollout.pipeline_parallel_size
        train = self.config.train
        micro = micro_tokens(one.training.tokens, self._rows.length) / train.sequence_parallel_size
        sharded = train.options.get("stage", 3) == 3
        roles = [
            replace(
                role,
                ranks=one.ranks[role.role],
                devices=names[role.role],
                recomputed=one.training.checkpointing,
                micro_tokens=micro if sharded else math.inf,
                offloaded=self._trained(role.role) if one.training.offload and role.trained else 0.0,
            )
            for role in self._work.roles
        ]
        rollout = self._rollout_role(one.tensor_parallel, one.grouping == "together").rollout
        room = 0.0 if rollout is None else float(rollout.cache_tokens * self._work.policy.cache_bytes)
        return replace(
            self._work, engines=one.engines, tensor_parallel=size, cache_room=room, roles=roles, moved=0.0
        )

    def _trained(self, role: str) -> float:
        engine = self._training_role(
            role, self.unit, Training(offload=False, tokens=self._rows.length, checkpointing=True)
        ).engine
        return 0.0 if engine is None else float(engine.trained_elements)

    def fit(self, one: Candidate) -> RunFit:
        """The memory of a layout."""
        names = _names(one, self.config)
        roles = [
            replace(self._training_role(role, one.ranks[role], one.training), devices=names[role])
            for role in self._configs
        ]
        shared = one.grouping == "together"
        rollout = replace(
            self._rollout_role(one.tensor_parallel, shared), workers=one.engines, devices=names["rollout"]
        )
        bucket = 2 * self.config.weight_sync.bucket_bytes
        every = (*roles, rollout)
        sets = device_sets(every, self.device, on_gpus=True, bucket=bucket)
        return RunFit(device=self.device, on_gpus=True, roles=every, sets=sets)

    def fits(self, fit: RunFit) -> bool:
        """Whether all of it has room by the plan, no error taken off, and the cache for a longest sample."""
        cached = all(one.rollout is None or one.rollout.at_once >= 1 for one in fit.roles)
        return cached and all(one.peak <= self.device.memory for one in fit.sets)

    def _training_role(self, role: str, ranks: int, how: Training) -> RoleFit:
        key = (role, ranks, how)
        if key not in self._roles:
            config = self._configs[role]
            options = {**config.options, "offload_optimizer": how.offload}
            changed = (
                replace(
                    config,
                    options=options,
                    max_tokens_per_micro_batch=how.tokens,
                    gradient_checkpointing=how.checkpointing,
                )
                if config.role != "reward"
                else replace(config, max_tokens_per_micro_batch=how.tokens)
            )
            planner = EnginePlanner(
                changed, ranks=ranks, rows=self._rows, recipe=self.config.recipe, known=self.known
            )
            self._roles[key] = training_role(role, planner, self.device, devices=role)
        return self._roles[key]

    def _rollout_role(self, ways: int, shared: bool) -> RoleFit:
        key = (ways, shared)
        if key not in self._rollouts:
            base = rollout_plans(self._base, self.backends, weights=self.config.weight_sync)[0].arguments[1]
            buffers = weight_buffer_bytes(self.backends.device, self.config.weight_sync, shares_devices=shared)
            config = replace(base, tensor_parallel_size=ways, shares_devices=shared, weight_buffer_bytes=buffers)
            self._rollouts[key] = rollout_role(config, self.known.of_rollout(config), self._rows, self.device)
        return self._rollouts[key]

    def planned(self, one: Candidate) -> FoundLayout:
        """A candidate as a run of its own.

        Raises:
            UserError: it cannot be placed on these hosts.
        """
        config = applied(self.config, one)
        return FoundLayout(
            candidate=one, config=config, plan=self.plan(config, resolve_backends(config, hosts=self.hosts))
        )

    def plan(self, config: OnlineConfig, backends: ResolvedBackends) -> RunPlan:
        """The plan of a layout on these hosts.

        Raises:
            UserError: it cannot be placed there.
        """
        lay_out(plans_of(config, backends), self.hosts)
        return plan_run(config, backends, self.device, self.calibration, host_gpus=self.host_gpus, known=self.known)


def _names(one: Candidate, config: OnlineConfig) -> dict[str, str]:
    sets = device_sets_of(one.grouping, config.roles)
    return {role: " + ".join(members) for members in sets for role in members}


def search(searcher: Searcher, *, best: int = 4) -> Search:
    """The fastest layouts that fit.

    Args:
        searcher: of the run.
        best: how many, those of one grouping that are about as fast counted once.
    """
    config = searcher.config
    written, why_not = None, ""
    try:
        written = searcher.plan(config, searcher.backends)
    except UserError as error:
        why_not = str(error)
    candidates = searcher.candidates()
    priced = sorted(
        ((searcher.seconds(one), place) for place, one in enumerate(candidates)),
    )
    of_each: dict[Grouping, list[FoundLayout]] = {}
    too_large = 0
    for seconds, place in priced:
        one = candidates[place]
        kept = of_each.setdefault(one.grouping, [])
        if any(one.same_places(other.candidate) for other in kept):
            continue
        if len(kept) == _OF_EACH or (kept and seconds < _ALIKE * kept[-1].plan.seconds["step"].value):
            continue
        if not searcher.fits(searcher.fit(one)):
            too_large += 1
            continue
        try:
            kept.append(searcher.planned(one))
        except UserError:
            continue  # no room for its groups on these hosts; the next one is as good
    return Search(
        tried=len(candidates),
        too_large=too_large,
        found=_best(of_each, best),
        written=written,
        why_not=why_not,
    )


def _best(of_each: Mapping[Grouping, Sequence[FoundLayout]], best: int) -> tuple[FoundLayout, ...]:
    """The best of each grouping, then whatever is fastest."""

    def seconds(one: FoundLayout) -> float:
        return one.plan.seconds["step"].value

    firsts = sorted((min(kept, key=seconds) for kept in of_each.values() if kept), key=seconds)[:best]
    others = sorted((one for kept in of_each.values() for one in kept if one not in firsts), key=seconds)
    return tuple(sorted([*firsts, *others[: best - len(firsts)]], key=seconds))
