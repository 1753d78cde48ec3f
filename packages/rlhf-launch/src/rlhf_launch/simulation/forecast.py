"""What other settings would give: a recorded run's lengths and timings under the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from rlhf_core import ConfigError

from rlhf_launch.samples.ledger import LedgerLimits
from rlhf_launch.simulation.records import RecordedRun, RecordedSetting
from rlhf_launch.simulation.run import SimulatedRun, Simulation

_FILL = 3
_AFTER = 4
"""Steps at the end that are not counted, in which less and less is left to be generated."""
_MOST = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What one setting would give."""

    setting: RecordedSetting
    step_s: float
    """Seconds of a step."""
    trainer_idle_s: float
    """Seconds of a step in which the trainer waits."""
    engine_idle_s: float
    """Seconds of a step in which an engine has no work or stands still."""
    staleness: float
    """Weight updates that the oldest token of a sample is behind, on average."""

    @property
    def devices(self) -> int:
        """GPUs of trainer and engines together."""
        return self.setting.trainer_ranks + self.setting.engines * self.setting.engine_devices

    @property
    def steps_per_hour(self) -> float:
        """Steps of an hour."""
        return 3600 / self.step_s

    @property
    def prompts_per_device_hour(self) -> float:
        """Prompts trained on in an hour, for each GPU."""
        return self.steps_per_hour * self.setting.per_step / self.devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternatives:
    """Settings to be tried, each with each; an empty list keeps what was recorded."""

    engines: Sequence[int] = ()
    staleness: Sequence[int] = ()
    """0 alternates; otherwise generation goes on while the policy is trained."""
    in_flight: Sequence[int] = ()
    """Prompts at the same time at most; 0 for as many as the staleness allows."""
    per_step: Sequence[int] = ()
    pause: bool = False
    """Let generation stand still while the policy is trained (`pause_while_training`)."""

    def __post_init__(self) -> None:
        for name, least in (("engines", 1), ("staleness", 0), ("in_flight", 0), ("per_step", 1)):
            for value in getattr(self, name):
                if value < least:
                    raise ConfigError(f"simulate: {name} must be {least} or more, got {value}")

    def of(self, recorded: RecordedSetting) -> list[RecordedSetting]:
        """The settings, without the recorded one.

        Raises:
            ConfigError: too many of them.
        """
        found: list[RecordedSetting] = []
        for engines, staleness, in_flight, per_step in product(
            self.engines or (recorded.engines,),
            self.staleness or (recorded.max_staleness,),
            self.in_flight or (recorded.max_in_flight,),
            self.per_step or (recorded.per_step,),
        ):
            overlapping = "pause" if self.pause else "run"
            setting = replace(
                recorded,
                engines=engines,
                max_staleness=staleness,
                max_in_flight=in_flight if staleness else 0,
                per_step=per_step,
                during_training=overlapping if staleness else "rest",
            )
            if setting != recorded and setting not in found:
                found.append(setting)
        if len(found) > _MOST:
            raise ConfigError(f"simulate: {len(found)} settings; give lists that make {_MOST} or fewer")
        return found


def forecast(run: RecordedRun, setting: RecordedSetting, *, steps: int = 24, seed: int = 0) -> Forecast:
    """Simulate a setting with the lengths and speeds of a recorded run.

    Args:
        run: what was recorded.
        setting: to be tried.
        steps: that are counted.
        seed: of the draw of recorded prompts.
    """
    limits = LedgerLimits(
        per_step=setting.per_step,
        steps=_FILL + steps + _AFTER + setting.max_staleness,
        max_staleness=setting.max_staleness,
        max_in_flight=setting.max_in_flight,
    )
    speed = run.speed()
    simulated = SimulatedRun(
        limits=limits,
        samples=setting.samples,
        engines=setting.engines,
        during_training=setting.during_training,
        length_of=run.length_of(seed),
        speed=replace(speed, engine=replace(speed.engine, max_samples=setting.max_num_seqs)),
        seed=seed,
        standstill_s=1e9,
    )
    rows = Simulation(simulated).run().rows[_FILL : _FILL + steps]

    def mean(name: str) -> float:
        return sum(row.get(name, 0.0) for row in rows) / len(rows)

    return Forecast(
        setting=setting,
        step_s=mean("seconds/step"),
        trainer_idle_s=mean("idle_seconds/policy"),
        engine_idle_s=mean("idle_seconds/rollout"),
        staleness=mean("staleness/mean"),
    )
