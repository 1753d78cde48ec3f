"""What a real run has recorded of its lengths and timings, as the speeds of a simulated one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rlhf_algos import read_metrics
from rlhf_core import DataError

from rlhf_launch.samples.producer import During
from rlhf_launch.simulation.engines import EngineSpeed, SyncSpeed
from rlhf_launch.simulation.run import LengthOf, SimulatedSpeed
from rlhf_launch.simulation.trainer import RewardSpeed, TrainSpeed

_FILL = 2
"""Steps at the start of a run that are not counted: engines warm up, the pipeline fills."""
_LEAST_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSetting:
    """The setting that a run was recorded with."""

    engines: int
    per_step: int
    """Prompts of a step."""
    samples: int
    during_training: During
    max_staleness: int = 0
    max_in_flight: int = 0
    max_num_seqs: int = 256
    trainer_ranks: int = 1
    engine_devices: int = 1
    """Devices of an engine."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RecordedSetting:
        """As a run's `config.yaml` says."""
        rollout, train = config["rollout"], config["train"]
        overlap = rollout.get("overlap") or {}
        during: During = "rest"
        if overlap:
            during = "pause" if overlap.get("pause_while_training") else "run"
        return cls(
            engines=rollout.get("engines", 1),
            per_step=train["prompts_per_step"],
            samples=rollout.get("samples_per_prompt", 8),
            during_training=during,
            max_staleness=overlap.get("max_staleness", 1) if overlap else 0,
            max_in_flight=overlap.get("max_in_flight", 0),
            max_num_seqs=rollout.get("max_num_seqs", 256),
            trainer_ranks=train.get("ranks", 1),
            engine_devices=rollout.get("tensor_parallel_size", 1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """Lengths and timings of a run's steps."""

    setting: RecordedSetting
    lengths: Sequence[Sequence[Sequence[int]]]
    """Of each counted step, of each of its prompts: the response tokens of the samples."""
    rows: Sequence[Mapping[str, float]]
    """The metrics of the same steps."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return _mean([row["seconds/step"] for row in self.rows])

    def speed(self) -> SimulatedSpeed:
        """How long everything takes: fitted by least squares to the steps, all coefficients 0 or more."""
        setting = self.setting
        tokens = [float(sum(sum(group) for group in step)) for step in self.lengths]
        longest = [float(max(max(group) for group in step)) for step in self.lengths]
        generating = [row["seconds/rollout"] for row in self.rows]
        if setting.during_training == "rest":
            share = [count / setting.engines for count in tokens]
            alone_s, more_s = _fit(longest, share, generating)
        else:
            # A run that overlaps says only how much its engines get done in the time in which they work.
            busy = [max(1e-9, row["seconds/step"] - row["idle_seconds/rollout"]) for row in self.rows]
            alone_s, more_s = 0.0, sum(busy) * setting.engines / sum(tokens)
        rest = [row["seconds/step"] - _known(row) for row in self.rows]
        step_s, token_s = _fit([1.0] * len(rest), tokens, rest)
        return SimulatedSpeed(
            engine=EngineSpeed(alone_s=alone_s, more_s=more_s, max_samples=setting.max_num_seqs),
            train=TrainSpeed(step_s=step_s, token_s=token_s),
            sync=SyncSpeed(seconds=_mean([row.get("seconds/sync", 0.0) for row in self.rows])),
            reward=RewardSpeed(seconds=_mean([row.get("seconds/reward", 0.0) for row in self.rows]), steady=True),
        )

    def length_of(self, seed: int = 0) -> LengthOf:
        """Lengths of a simulated run's samples: those of a recorded prompt that is drawn for each prompt."""
        groups = [group for step in self.lengths for group in step]

        def length_of(label: str, index: int) -> float:
            group = groups[random.Random(f"{seed}/{label}").randrange(len(groups))]
            return float(group[index % len(group)])

        return length_of


def read_run(directory: Path) -> RecordedRun:
    """Read what a run has recorded in its output directory.

    Raises:
        DataError: there is no run, or too little of one; says what is missing.
    """
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
        if not (directory / name).is_file():
            raise DataError(
                f"{str(directory)!r} has no {name}; give the output directory of a run of `rlhf train` that has "
                "completed some steps"
            )
    try:
        setting = RecordedSetting.of(yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8")))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{str(directory / 'config.yaml')!r} is not the configuration of a run: {error}") from error
    rows = read_metrics(directory / "metrics.jsonl")
    return recorded(setting, rows, read_metrics(directory / "samples.jsonl"), source=str(directory))


def recorded(
    setting: RecordedSetting,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Mapping[str, Any]],
    *,
    source: str,
) -> RecordedRun:
    """The recorded steps that count.

    Args:
        setting: of the run.
        rows: of `metrics.jsonl`.
        prompts: of `samples.jsonl`, a row for each step.
        source: where these are from, for messages.

    Raises:
        DataError: too few steps.
    """
    lengths: dict[int, list[list[int]]] = {}
    for row in prompts:
        used = [entry["lengths"] for entry in row["prompts"] if entry["outcome"] == "used"]
        if used:
            lengths[int(row["step"])] = used
    steps = {int(row["step"]): row for row in rows if "seconds/step" in row and "seconds/rollout" in row}
    both = sorted(steps.keys() & lengths.keys())[_FILL:]
    if len(both) < _LEAST_STEPS:
        raise DataError(
            f"{source}: {len(both)} steps with lengths and timings after the first {_FILL}, which are not counted; "
            f"a forecast needs {_LEAST_STEPS} at least. Let the run go on"
        )
    return RecordedRun(
        setting=setting, lengths=[lengths[step] for step in both], rows=[steps[step] for step in both]
    )


def _known(row: Mapping[str, float]) -> float:
    """Seconds of a step that are not the trainer's."""
    return sum(row.get(f"seconds/{phase}", 0.0) for phase in ("rollout", "reward", "sync", "replacement"))


def _fit(first: Sequence[float], second: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Coefficients of 0 or more with which the two add up to the seconds, by least squares."""
    columns = np.array([first, second], dtype=float).T
    wanted = np.array(seconds, dtype=float)
    candidates = [(0.0, 0.0)]
    both = np.linalg.lstsq(columns, wanted, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    for place in (0, 1):
        alone = columns[:, place]
        value = max(0.0, float(alone @ wanted / max(alone @ alone, 1e-12)))
        candidates.append((value, 0.0) if place == 0 else (0.0, value))
    return min(candidates, key=lambda pair: float(((columns @ np.array(pair) - wanted) ** 2).sum()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
