"""A whole run under a virtual clock: the run's own loop, ledger, producer, pool, sync and replacement."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from rlhf_algos import CheckpointSchedule
from rlhf_core import ConfigError, PauseMode, SamplingConfig, StopRequest
from rlhf_rollout import FailureHandling, RobustReward

from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.online.evaluation import Evaluator
from rlhf_launch.online.loop import OnlineRun, Schedule, run_steps
from rlhf_launch.online.state import RunState
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.samples.groups import GroupMaker
from rlhf_launch.samples.ledger import Ledger, LedgerLimits
from rlhf_launch.samples.producer import During, Producer, ProducerConfig
from rlhf_launch.samples.prompts import Prompt, PromptStream
from rlhf_launch.samples.reward import Rewarder
from rlhf_launch.samples.sampling import response_sampler
from rlhf_launch.simulation.clock import VirtualClock
from rlhf_launch.simulation.engines import EngineSpeed, Lengths, SimulatedEngine, SimulatedWeights, SyncSpeed
from rlhf_launch.simulation.trainer import (
    NoTokenizer,
    RewardSpeed,
    SimulatedRank,
    SimulatedReporter,
    SimulatedReward,
    SimulatedStore,
    SimulatedTrainer,
    TrainSpeed,
)
from rlhf_launch.weight_sync.replacement import RolloutReplacement
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.waits import Waits

LengthOf = Callable[[str, int], float]
"""Response tokens of a sample, by the position of its prompt in the stream (as text) and its place in the group."""

_DISTINCT_PROMPTS = 1024


class SimulatedKill(BaseException):
    """The end of a simulated process, of which its code learns nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedFaults:
    """What goes wrong, by chance that follows from the run's seed."""

    death_s: float = 0.0
    """Mean seconds until an engine dies; 0: none does."""
    cut_off_s: float = 0.0
    """Mean seconds until nothing comes from an engine any more; 0: that does not happen."""
    cut_off_for_s: float = 60.0
    """For how long nothing comes from it."""
    sync_death: float = 0.0
    """Share of the weight syncs in which an engine dies."""
    failed_start: float = 0.0
    """Share of the replacements that do not come up."""
    replacements: int = 1_000_000
    """Replacements of a run."""
    kill_s: float = 0.0
    """When the whole process is killed; 0: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedSpeed:
    """How long everything takes."""

    engine: EngineSpeed = field(default_factory=lambda: EngineSpeed(alone_s=0.01))
    train: TrainSpeed = field(default_factory=TrainSpeed)
    sync: SyncSpeed = field(default_factory=SyncSpeed)
    reward: RewardSpeed = field(default_factory=RewardSpeed)
    start_s: float = 30.0
    """Seconds until a replacement is up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """A run to be simulated."""

    limits: LedgerLimits
    samples: int = 8
    """Samples of a prompt."""
    engines: int = 1
    during_training: During = "rest"
    filter_flat: bool = False
    pause_mode: PauseMode = "keep"
    """What engines can do in a pause."""
    length_of: LengthOf = lambda label, index: 100.0
    speed: SimulatedSpeed = field(default_factory=SimulatedSpeed)
    faults: SimulatedFaults = field(default_factory=SimulatedFaults)
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: at the end only."""
    standstill_s: float = 1800.0
    """How long nothing may move (`placement.timeout_s`)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.limits.max_staleness and self.during_training == "rest":
            raise ConfigError("simulation: max_staleness > 0 needs during_training pause or run, got rest")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """What a simulated run did."""

    seconds: float
    """Virtual seconds from the first prompt to the end of the last step."""
    rows: Sequence[Mapping[str, float]]
    """The metrics of each step."""
    prompts: Sequence[Mapping[str, Any]]
    """What became of every prompt, with the step; see `rlhf_launch.samples.account.PromptAccount`."""
    counts: Mapping[str, int]
    """The ledger's."""
    lost_engines: int
    """Engines that were lost and replaced, or not."""


class Simulation:
    """A run that can be killed and resumed: `store` outlives it."""

    def __init__(self, config: SimulatedRun, store: SimulatedStore | None = None) -> None:
        self.config = config
        self.store = store or SimulatedStore()
        self.reporter = SimulatedReporter()
        self.clock = VirtualClock()
        speed = config.speed
        self._chance = random.Random(f"{config.seed}/faults")
        self._weights = SimulatedWeights(self.clock, speed.sync)
        self._weights.on_send = self._maybe_kill_receiver
        self._lengths = Lengths(config.length_of)
        self.engines: dict[str, SimulatedEngine] = {}
        self.deaths = 0
        self.ledger = Ledger(config.limits)
        self._began = 0.0

    def run(self) -> SimulationReport:
        """Run until the last step.

        Raises:
            SimulatedKill: the process was killed; another simulation with this `store` continues.
            RLHFError: what has ended the run.
            Deadlock: it hangs.
        """
        if self.config.faults.kill_s:
            self.clock.loop.call_later(self.config.faults.kill_s, self.clock.stop, SimulatedKill())
        with _without_collector():
            self.clock.run(self._run)
        return self.report()

    def report(self) -> SimulationReport:
        """What was done until now."""
        return SimulationReport(
            seconds=self.clock.now() - self._began,
            rows=self.reporter.rows,
            prompts=self.reporter.prompts,
            counts=dict(self.ledger.counts),
            lost_engines=self.deaths,
        )

    def _run(self) -> None:
        config = self.config
        waits = Waits(config.standstill_s, clock=self.clock)
        names = [f"rollout-{number}" for number in range(config.engines)]
        pool = RolloutPool([self._engine(name, start_s=0.0) for name in names], waits=waits)
        waits.rescue = pool.end_stuck
        policy = TrainGroup("policy", [SimulatedRank(self._weights)], waits=waits)
        pool.start()
        options = WeightSyncSection(probe_every=0)
        sync = WeightSync(policy, pool, transports=("disk",), options=options)
        replacement = RolloutReplacement(self, pool, sync, limit=config.faults.replacements)
        pool.replace_with(replacement)
        run = self._parts(waits, pool, policy, sync, replacement)
        try:
            if (saved := self.store.newest) is not None:
                sync(run.state.restore(cast(Any, saved)))
            self._began = self.clock.now()
            run_steps(run)
        finally:
            replacement.stop()
            run.producer.close()

    def _parts(
        self,
        waits: Waits,
        pool: RolloutPool,
        policy: TrainGroup,
        sync: WeightSync,
        replacement: RolloutReplacement,
    ) -> OnlineRun:
        """The parts of the run: the controller's own, and stand-ins for what computes, stores and shows."""
        config, speed = self.config, self.config.speed
        reward = RobustReward(SimulatedReward(speed.reward, config.seed), FailureHandling(then="drop"))
        rewarder = Rewarder(reward, NoTokenizer())
        sampler = response_sampler(pool, SamplingConfig(max_tokens=1 << 30), seed=config.seed)
        prompts = PromptStream(_prompts(), seed=config.seed, shuffle=False)
        producer = Producer(
            GroupMaker(sampler, rewarder),
            prompts,
            self.ledger,
            pool,
            ProducerConfig(
                samples=config.samples, during_training=config.during_training, filter_flat=config.filter_flat
            ),
            waits,
        )
        schedule = CheckpointSchedule(every=config.checkpoint_every, clock=self.clock.now)
        return OnlineRun(
            schedule=Schedule(steps=config.limits.steps, overlapping=config.during_training != "rest"),
            trainer=cast(Any, SimulatedTrainer(policy, speed.train, config.length_of)),
            producer=producer,
            pool=pool,
            sync=sync,
            replacement=replacement,
            evaluator=Evaluator({}, _no_groups, waits),
            reporter=cast(Any, self.reporter),
            state=RunState(cast(Any, self.store), [], producer, cast(Any, _NoKL()), schedule=schedule),
            stop=StopRequest(),
            prompts=prompts,
            make_groups=_no_groups,
        )

    # ------------------------------------------------------------ engines, as their executor

    transports = ("disk",)
    one_process = False

    def place(self, plans: Sequence[WorkerPlan]) -> list[SimulatedEngine]:
        """See Executor."""
        return [self.restart(plan.name) for plan in plans]

    def restart(self, name: str) -> SimulatedEngine:
        """See Executor."""
        fails = self._chance.random() < self.config.faults.failed_start
        start_s = self.config.speed.start_s
        return self._engine(name, start_s=-start_s if fails else start_s)

    def close(self) -> None:
        """See Executor."""

    def _engine(self, name: str, *, start_s: float) -> SimulatedEngine:
        config, faults = self.config, self.config.faults
        engine = self.engines[name] = SimulatedEngine(
            name,
            self._weights,
            config.speed.engine,
            self._lengths,
            pause_mode=config.pause_mode,
            start_s=start_s,
        )
        if faults.death_s:
            after = self._chance.expovariate(1 / faults.death_s)
            self.clock.loop.call_later(after, self._kill, engine, "its host is gone")
        if faults.cut_off_s:
            after = self._chance.expovariate(1 / faults.cut_off_s)
            self.clock.loop.call_later(after, engine.cut_off, faults.cut_off_for_s)
        return engine

    def _kill(self, engine: SimulatedEngine, reason: str) -> None:
        self.deaths += engine.lost is None
        engine.die(reason)

    def _maybe_kill_receiver(self, receivers: Sequence[SimulatedEngine]) -> None:
        if receivers and self._chance.random() < self.config.faults.sync_death:
            after = self._chance.random() * self.config.speed.sync.seconds
            self.clock.loop.call_later(after, self._kill, self._chance.choice(receivers), "it died in a sync")


@contextmanager
def _without_collector() -> Iterator[None]:
    """A block without Python's garbage collector, which would look through every prompt in flight all the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _NoKL:
    """In the place of a controller of the KL coefficient."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        pass


def _no_groups(sampling: SamplingConfig, *, greedy_scores: bool = False) -> GroupMaker:
    raise ConfigError("a simulated run has no evaluation")


def _prompts() -> list[Prompt]:
    return [Prompt(prompt_id=str(n), text=str(n), token_ids=(5,)) for n in range(_DISTINCT_PROMPTS)]
