"""The work of a configured run's step, and the calibration that its own earlier metrics give."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rlhf_algos import read_metrics
from rlhf_core import DataError, ImaginedModel, cache_bytes_per_token

from rlhf_launch.config.placement import REWARD
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.planning.calibration import Calibration, Line
from rlhf_launch.planning.devices import Device
from rlhf_launch.planning.fit import RoleFit, RunFit, micro_batch, row_shape
from rlhf_launch.planning.published import ModelShape, Phase
from rlhf_launch.planning.work import RoleWork, StepWork, least_seconds

_PHASES: dict[str, Phase] = {
    "seconds/rollout": "generation",
    "seconds/sync": "weight sync",
    "seconds/score": "scoring",
    "seconds/train": "training",
}
_WARM_UP = 2
_LEAST = 3


def step_work(config: OnlineConfig, fit: RunFit, *, host_gpus: int = 8) -> StepWork:
    """What a step of the run has to do; responses as long as they may be.

    Args:
        config: the run.
        fit: its memory.
        host_gpus: GPUs of a host.
    """
    rollout, train = config.rollout, config.train
    roles = {one.role: one for one in fit.roles}
    ways = rollout.tensor_parallel_size * rollout.pipeline_parallel_size
    gpus: dict[str, int] = {}
    for one in fit.roles:
        size = ways if one.role == "rollout" else 1
        gpus[one.devices] = max(gpus.get(one.devices, 0), one.workers * size)
    generator = roles["rollout"]
    policy = model_shape(roles["policy"])
    room = generator.rollout.cache_tokens * policy.cache_bytes if generator.rollout is not None else math.inf
    # The longest rows: no others are known before any data is read.
    rows = row_shape(config)
    return StepWork(
        samples=train.prompts_per_step * rollout.samples_per_prompt,
        prompt=rows.prompt,
        response=rows.response,
        policy=policy,
        engines=rollout.engines,
        tensor_parallel=ways,
        cache_room=room,
        most_at_once=rollout.max_num_seqs,
        roles=[_role_work(config, one) for one in fit.roles if one.engine is not None],
        gpus=sum(gpus.values()),
        moved=moved_between_turns(fit) if fit.on_gpus else 0.0,
        host_gpus=host_gpus,
        overlaps=rollout.overlap is not None and not rollout.overlap.pause_while_training,
    )


def model_shape(role: RoleFit) -> ModelShape:
    """The model of a training role, from what was imagined of it."""
    if role.engine is None:
        raise ValueError(f"{role.role} is no training role")
    model: ImaginedModel = role.engine.model
    text = model.text
    return ModelShape(
        name=model.config.model,
        parameters=float(sum(one.elements for one in model.parameters)),
        layers=model.layers,
        hidden=text.hidden_size,
        cache_bytes=cache_bytes_per_token(text, model.config.dtype, layers=model.layers),
    )


def micro_tokens(setting: int | Literal["auto"], row: int) -> int:
    """Tokens of a full micro-batch of the longest rows."""
    return max(1, micro_batch(setting) // row) * row


def _offloaded(role: RoleFit) -> float:
    if role.engine is None or not role.engine.step or role.engine.states.optimizer:
        return 0.0
    return float(role.engine.trained_elements)


def _role_work(config: OnlineConfig, role: RoleFit) -> RoleWork:
    train = config.train
    micro = micro_tokens(train.max_tokens_per_micro_batch, max(1, config.max_length)) / train.sequence_parallel_size
    trained = role.role in ("policy", "critic")
    scores = role.role != "policy" or config.scores_always or config.train.updates(1) > 1
    return RoleWork(
        role=role.role,
        model=model_shape(role),
        # Reward models score while samples are generated.
        ranks=role.workers,
        trained=trained,
        passes=float(config.train.epochs_per_step) if trained else 0.0,
        recomputed=config.train.gradient_checkpointing,
        scores=scores and not role.role.startswith(REWARD),
        micro_tokens=micro if train.options.get("stage", 3) == 3 else math.inf,
        offloaded=_offloaded(role),
        updates=config.train.updates(1),
        devices=role.devices,
    )


def moved_between_turns(fit: RunFit) -> float:
    """Bytes that roles which share devices move to host memory and back in a step, the most of any device."""
    most = 0.0
    for one in fit.sets:
        if len(one.roles) > 1:
            here = [role for role in fit.roles if role.role in one.roles]
            held = sum(
                role.engine.resident if role.engine else role.rollout.weights if role.rollout else 0
                for role in here
            )
            most = max(most, 2.0 * held)
    return most


def own_calibration(metrics: Path, work: StepWork, device: Device) -> Calibration:
    """A calibration on the steps of an earlier run of the same configuration.

    Args:
        metrics: the `metrics.jsonl` of the run.
        work: of a step of that run, with the longest responses; those of the metrics are put in their place.
        device: what it ran on.

    Raises:
        DataError: there are too few steps in the file.
    """
    if not metrics.is_file():
        raise DataError(f"{str(metrics)!r} is no file; give the metrics.jsonl of a run")
    rows = [row for row in read_metrics(metrics) if "seconds/step" in row][_WARM_UP:]
    if len(rows) < _LEAST:
        raise DataError(
            f"{str(metrics)!r}: {len(rows)} steps with timings after the first {_WARM_UP}, which are not counted; "
            f"a calibration needs {_LEAST} at least"
        )
    excess: dict[Phase, list[float]] = {}
    for row in rows:
        length = row.get("response_length") or work.response
        least = least_seconds(replace(work, response=max(1.0, length)), device)
        for key, phase in _PHASES.items():
            if (row.get(key) or 0.0) > 0 and least[phase] > 0:
                excess.setdefault(phase, []).append(math.log(row[key] / least[phase]))
    lines: dict[Phase, Line] = {}
    for phase in _PHASES.values():
        points = excess.get(phase) or [0.0]
        mean = sum(points) / len(points)
        spread = math.sqrt(sum((one - mean) ** 2 for one in points) / len(points))
        # Measured with one tensor parallel size, which says nothing of others.
        lines[phase] = Line(base=mean, slope=0.0, error=max(spread, 0.05))
    return Calibration(lines=lines, source=f"{len(rows)} steps of {metrics}")
