"""A plan as text: what each role holds, what takes how long, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core import ResourceError

from rlhf_launch.config.placement import is_training
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement.resolve import ResolvedBackends
from rlhf_launch.planning.calibration import Calibration, Seconds, longer_phases, predicted, published_calibration
from rlhf_launch.planning.devices import Device
from rlhf_launch.planning.fit import ERROR, PHASES, RoleFit, RunFit, SetFit, fit_run
from rlhf_launch.planning.memory import KnownModels
from rlhf_launch.planning.timing import step_work
from rlhf_launch.tables import aligned


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A run's memory, and its seconds where a device is known."""

    fit: RunFit
    seconds: Mapping[str, Seconds]
    source: str
    """What the seconds are calibrated on."""
    samples: int
    gpus: int
    overlap: str = ""
    """Whether it pays that generation goes on while the others work."""

    def text(self) -> str:
        """All of it, for people."""
        return "\n".join([_memory_table(self.fit), *_verdict(self.fit), *self._time_lines()])

    def _time_lines(self) -> list[str]:
        if not self.seconds:
            return []
        rows = [("phase", "seconds", "from", "to")]
        rows += [
            (name, f"{one.value:,.1f}", f"{one.low:,.1f}", f"{one.high:,.1f}") for name, one in self.seconds.items()
        ]
        step = self.seconds["step"].value
        return [
            "",
            aligned(rows, right=(1, 2, 3)),
            f"{step / self.samples:.3g} s per sample; seconds are calibrated on {self.source}, responses as long "
            "as they may be",
            *([self.overlap] if self.overlap else []),
        ]

    def short(self) -> list[str]:
        """Two lines for the head of a run."""
        fit, lines = self.fit, []
        tops = ", ".join(f"{' + '.join(one.roles)} {_gib(one.peak)} ({one.phase})" for one in fit.sets)
        size = "" if fit.device is None else f" of {_gib(fit.device.memory)}"
        lines.append(f"plan: memory{size} {'per GPU' if fit.on_gpus else 'per process'}: {tops}")
        if self.seconds and fit.on_gpus:
            step = self.seconds["step"]
            lines.append(f"plan: a step of about {step.value:,.0f} s ({step.low:,.0f} to {step.high:,.0f})")
        return lines + [line for line in _verdict(fit) if line.startswith(("may not", "does not"))]


def plan_run(
    config: OnlineConfig,
    backends: ResolvedBackends,
    device: Device | None,
    calibration: Calibration | None = None,
    *,
    host_gpus: int = 8,
    known: KnownModels | None = None,
) -> RunPlan:
    """Plan a run.

    Args:
        config: the run; its layout filled already.
        backends: its parts.
        device: what its workers sit on; None if it is not known.
        calibration: of its seconds; the published one if not given.
        host_gpus: GPUs of a host.
        known: models that were imagined before.

    Raises:
        ConfigError: the configuration of a model is not at hand.
    """
    fit = fit_run(config, backends, device, known)
    calibration = calibration or published_calibration()
    seconds: dict[str, Seconds] = {}
    samples, gpus = config.train.prompts_per_step * config.rollout.samples_per_prompt, 0
    if device is not None:
        work = step_work(config, fit, host_gpus=host_gpus)
        seconds, gpus = predicted(work, device, calibration), work.gpus
    overlap = overlap_line(config, seconds) if fit.on_gpus and seconds else ""
    return RunPlan(fit=fit, seconds=seconds, source=calibration.source, samples=samples, gpus=gpus, overlap=overlap)


_PAYS = 0.05
"""Share of a step below which overlap is not worth samples that are older."""


def overlap_line(config: OnlineConfig, seconds: Mapping[str, Seconds]) -> str:
    """Whether overlap pays: a step in turns, against its longer part and the sync.

    Args:
        config: the run.
        seconds: of its phases.
    """
    beside = {role for members in config.shared if "rollout" in members for role in members}
    if others := sorted(role for role in beside if is_training(role)):
        return f"overlap: not here, where generation shares its devices with {', '.join(others)}"
    turns = sum(one.value for name, one in seconds.items() if name != "step")
    overlapped = sum(seconds[name].value for name in longer_phases(seconds))
    its = config.rollout.overlap
    stale = 1 if its is None else its.max_staleness
    old = f"samples are then up to {stale} weight update{'s' if stale > 1 else ''} old"
    numbers = f"{overlapped:,.0f} s a step at best, {turns:,.0f} s in turns"
    if its is not None and not its.pause_while_training:
        return f"overlap: on, {numbers}; {old}"
    if overlapped > (1 - _PAYS) * turns:
        return f"overlap: hardly pays, {numbers}"
    how = f"rollout.overlap.max_staleness={stale}"
    if its is not None:
        how = "rollout.overlap.pause_while_training=false"
    return f"overlap: pays, {numbers} ({how}); {old}"


def refuse_what_does_not_fit(fit: RunFit) -> None:
    """Refuse a run that needs more than its devices have, by more than the plan may be off.

    Raises:
        ResourceError: names roles, phase and bytes, and what to write instead.
    """
    if not fit.too_large or fit.device is None:
        return
    worst = max(fit.too_large, key=lambda one: one.peak)
    raise ResourceError(
        f"{' + '.join(worst.roles)} need {_gib(worst.peak)} on a GPU ({worst.phase}; planned within {ERROR:.0%}), "
        f"and a {fit.device.name} has {_gib(fit.device.memory)}. {_advice(worst, fit)}; "
        "placement.check_memory=print starts the run as it is"
    )


def _advice(worst: SetFit, fit: RunFit) -> str:
    ideas = []
    roles = [one for one in fit.roles if one.role in worst.roles]
    engine = max((one for one in roles if one.engine), key=lambda one: max(one.phases.values()), default=None)
    if worst.phase in ("scoring", "training") and engine is not None and engine.engine is not None:
        plan = engine.engine
        if plan.states.optimizer:
            ideas.append(f"train.options.offload_optimizer=true moves {_gib(plan.states.optimizer)} to host memory")
        if max(plan.step, plan.score) - plan.resident > plan.resident / 4:
            ideas.append(f"train.max_tokens_per_micro_batch below {plan.tokens} makes passes smaller")
            if not plan.model.config.gradient_checkpointing:
                ideas.append("train.gradient_checkpointing=true keeps fewer activations")
        ideas.append("more ranks shard it further (stage 3)")
    else:
        ideas.append(
            "a larger rollout.tensor_parallel_size divides the weights, and a smaller "
            "rollout.options.gpu_memory_utilization leaves more to others"
        )
    return "; ".join(ideas)


def _memory_table(fit: RunFit) -> str:
    titles = ("role", "workers", "micro-batch", "states", "scoring", "training", "host memory", "remark")
    rows = [titles, *(_role_row(one) for one in fit.roles)]
    devices = [("on one device", *PHASES)]
    devices += [(" + ".join(one.roles), *(_gib(one.phases[name]) for name in PHASES)) for one in fit.sets]
    return f"{aligned(rows, right=(1, 2, 3, 4, 5, 6))}\n\n{aligned(devices, right=(1, 2, 3, 4))}"


def _role_row(one: RoleFit) -> tuple[str, ...]:
    if one.engine is not None:
        plan = one.engine
        training = _gib(plan.step) if plan.step else "-"
        numbers = (f"{plan.tokens:,}", _gib(plan.resident), _gib(plan.score), training)
        return (one.role, str(one.workers), *numbers, _gib(one.host), one.note)
    plan = one.rollout
    if plan is None:
        return (one.role, str(one.workers), "-", _gib(one.phases["generation"]), "-", "-", "-", "weights alone")
    room = f"cache of {plan.cache_tokens:,} tokens, {plan.at_once:.0f} longest samples at once"
    return (one.role, str(one.workers), "-", _gib(plan.weights), "-", "-", _gib(one.host), room)


def _verdict(fit: RunFit) -> list[str]:
    if fit.device is None:
        return ["", "no verdict: nothing is known of the devices (--device)"]
    if not fit.on_gpus:
        return ["", f"on CPUs processes share the {_gib(fit.device.memory)} of a host; nothing is refused there"]
    lines = [
        f"does not fit: {' + '.join(one.roles)} need {_gib(one.peak)} ({one.phase}) of {_gib(fit.device.memory)}. "
        f"{_advice(one, fit)}"
        for one in fit.too_large
    ]
    lines += [
        f"may not fit: {' + '.join(one.roles)} need about {_gib(one.peak)} ({one.phase}) of "
        f"{_gib(fit.device.memory)}"
        for one in fit.close
    ]
    return ["", *(lines or [f"fits on a {fit.device.name} ({_gib(fit.device.memory)}), within {ERROR:.0%}"])]


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
