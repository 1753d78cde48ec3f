"""How much longer a phase takes than it had to: fitted to runs whose seconds are known.

For each system and phase the logarithm of measured over least seconds is a line over the logarithm of the tensor
parallel size, its slope held small by a ridge: log(measured / least) = a + b log2(ways). What the line is off by,
each run left out in turn, is the error of a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_launch.planning.devices import DEVICES, Device
from rlhf_launch.planning.published import EFFICIENCY_DEVICE, PHASES, RUNS, Phase, PublishedRun, System
from rlhf_launch.planning.work import StepWork, least_seconds, published_work

_RIDGE = 0.25
"""Runs' worth of belief that the tensor parallel size changes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measured phase."""

    ways: int
    """Tensor parallel size."""
    excess: float
    """Log of measured over least seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """a + b log2(ways), and how far the points are off when each is predicted by the others."""

    base: float
    slope: float
    error: float = 0.0
    """Root mean square of the logarithms; 0.69 is a factor of two."""

    @classmethod
    def through(cls, points: Sequence[Point]) -> Line:
        """The least squares, with the error by leaving one out (the spread of all, where that leaves too few).

        >>> one = Line.through([Point(ways=1, excess=1.0), Point(ways=1, excess=1.0)])
        >>> one.base, one.slope, one.error
        (1.0, 0.0, 0.0)
        """
        base, slope = _fit(points)
        misses = left_out(points)
        error = math.sqrt(sum(miss * miss for miss in misses) / len(misses)) if misses else math.log(2)
        return cls(base=base, slope=slope, error=error)

    def at(self, ways: int) -> float:
        """By what factor a phase takes longer."""
        return math.exp(self.base + self.slope * math.log2(ways))


def left_out(points: Sequence[Point]) -> list[float]:
    """For each point the log of predicted over measured, from the line through the others."""
    if len(points) < 2:
        return []
    found = []
    for index, point in enumerate(points):
        base, slope = _fit([*points[:index], *points[index + 1 :]])
        found.append(base + slope * math.log2(point.ways) - point.excess)
    return found


def _fit(points: Sequence[Point]) -> tuple[float, float]:
    xs = [math.log2(point.ways) for point in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(point.excess for point in points) / len(points)
    across = sum((x - mean_x) * (point.excess - mean_y) for x, point in zip(xs, points, strict=True))
    slope = across / (sum((x - mean_x) ** 2 for x in xs) + _RIDGE)
    return mean_y - slope * mean_x, slope


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A line for each phase, and where they are from."""

    lines: Mapping[Phase, Line]
    source: str


def published_points(system: System, phase: Phase) -> list[Point]:
    """The four runs of a system. OpenRLHF's engines alone are tensor parallel, DeepSpeed-Chat is throughout."""
    return [_point(run, phase) for run in RUNS if run.system == system]


def _point(run: PublishedRun, phase: Phase) -> Point:
    least = least_seconds(published_work(run), DEVICES[EFFICIENCY_DEVICE])[phase]
    sliced = run.shared or phase in ("generation", "weight sync")
    return Point(
        ways=run.tensor_parallel if sliced else 1,
        excess=math.log(run.seconds[PHASES.index(phase)] / least),
    )


def published_calibration(system: System = "openrlhf") -> Calibration:
    """That of the published runs of a system."""
    return Calibration(
        lines={phase: Line.through(published_points(system, phase)) for phase in PHASES},
        source=f"4 published runs of {system}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """A predicted phase."""

    value: float
    factor: float
    """It is probably between the value over this factor and the value times it."""

    @property
    def low(self) -> float:
        """The lower end of the bar."""
        return self.value / self.factor

    @property
    def high(self) -> float:
        """The upper end of the bar."""
        return self.value * self.factor


def longer_phases(seconds: Mapping[str, Seconds]) -> list[str]:
    """The phases that a step takes where generation goes on meanwhile: the sync, and generation or all else."""
    rest = [name for name in seconds if name not in ("generation", "weight sync", "step")]
    longer = seconds["generation"].value > sum(seconds[name].value for name in rest)
    return [*(["generation"] if longer else rest), "weight sync"]


def predicted(work: StepWork, device: Device, calibration: Calibration) -> dict[str, Seconds]:
    """Seconds of each phase and of the `step`, with their bars.

    Where generation goes on meanwhile, a step takes as long as generation or all else, and the sync.
    """
    found: dict[str, Seconds] = {}
    for phase, least in least_seconds(work, device).items():
        line = calibration.lines[phase]
        ways = work.tensor_parallel if phase in ("generation", "weight sync") else 1
        found[phase] = Seconds(value=least * line.at(ways), factor=math.exp(line.error))
    if work.moved:
        seconds = work.moved / device.host_link
        found["turns"] = Seconds(value=seconds, factor=2.0)
    counted = [found[name] for name in (longer_phases(found) if work.overlaps else found)]
    total = sum(one.value for one in counted)
    # Errors of phases are taken as independent.
    spread = math.sqrt(sum((one.value * math.log(one.factor)) ** 2 for one in counted))
    found["step"] = Seconds(value=total, factor=math.exp(spread / max(total, 1e-12)))
    return found
