"""Two or more runs side by side: where they part first, and whether that is noise or a change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rlhf_core import ConfigError, DataError

from rlhf_launch.comparison.history import History, is_cost, read_histories
from rlhf_launch.comparison.noise import band_p, holm, paired_p, step_noise

Verdict = Literal["equal", "noise", "change"]

_GIVEN = ("learning_rate", "critic/learning_rate", "weight_version")
"""Metrics that follow from the settings: they have no noise."""
_LOOSE = ("mismatch", "sync/probe")
"""What the names of metrics begin with whose last bits depend on which requests happened to share a batch."""
_SAME = 1e-6
"""Differences below this share of a metric's own size are rounding."""
_LEAST_SHARE = 0.1
"""A shift below this share of a metric's noise from step to step is no change, however sure it is."""
_SHORTEST = 20
"""Steps that a part of a run must have to be looked at by itself."""
_OUTSIDE = 4.0
"""Noise scales from which on a single step is said to lie outside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricShift:
    """One metric of a run beside the same of its baselines, over the steps that all have."""

    name: str
    verdict: Verdict
    steps: int
    first: int | None
    """The first step that differs from the first baseline; None if none does."""
    baseline: float
    """Mean over the steps, and over the baselines."""
    candidate: float
    shift: float
    """Median of the differences to the baselines' mean that are not 0, over all steps, or over the last half or
    quarter where that tells more."""
    noise: float
    """What the metric differs by from step to step, or between the baselines, whichever is larger."""
    p: float
    """Probability of such differences without a change, corrected for the number of metrics."""
    outside: int | None
    """The first step at which the difference is above four times the noise."""
    remark: str = ""

    @property
    def shift_in_noise(self) -> float:
        """The shift in units of the noise."""
        if self.shift == 0:
            return 0.0
        return self.shift / self.noise if self.noise else math.copysign(math.inf, self.shift)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRatio:
    """A measure of time or memory beside the baselines', which has no part in the verdict."""

    name: str
    baseline: float
    """Median over the steps."""
    candidate: float

    @property
    def ratio(self) -> float:
        """Candidate by baseline."""
        return self.candidate / self.baseline if self.baseline else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A run beside its baselines."""

    candidate: str
    baselines: tuple[str, ...]
    steps: int
    """Steps that all of them have."""
    equal_steps: int
    """Of these, how many from the first on are bit-equal to those of `nearest`."""
    nearest: str
    """The baseline that the run is bit-equal to for longest."""
    first: int | None
    """The first step that differs from `nearest`; None if none does."""
    first_metrics: tuple[str, ...]
    """What differs there, the largest difference by its noise first."""
    metrics: tuple[MetricShift, ...]
    """Those that differ, changes first."""
    costs: tuple[CostRatio, ...]
    alpha: float

    @property
    def verdict(self) -> Verdict:
        """`change` if a metric changed, else `noise` if one differs, else `equal`."""
        found = {metric.verdict for metric in self.metrics}
        return "change" if "change" in found else "noise" if found else "equal"


def compare_runs(
    baselines: Sequence[History | Path | str],
    candidate: History | Path | str,
    *,
    metrics: Sequence[str] = (),
    alpha: float = 0.01,
) -> Comparison:
    """Compare a run with one or more others that ought to be like it.

    Args:
        baselines: runs' directories, `metrics.jsonl` files, or stored histories of several runs.
        candidate: one run.
        metrics: those to look at; all if none is named. Fewer metrics see smaller changes.
        alpha: probability of finding a change where there is none, over all metrics together.

    Raises:
        DataError: a run is not there or has no metrics, or they have no step in common.
        ConfigError: a metric is in none of the runs, `alpha` is no probability, or there are no baselines.
    """
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha must be between 0 and 1, got {alpha}")
    others = [history for given in baselines for history in _histories(given)]
    if not others:
        raise ConfigError("compare needs at least one baseline besides the run; give two runs")
    run = _one(candidate)
    steps = sorted(set(run.steps).intersection(*(other.steps for other in others)))
    if not steps:
        raise DataError(f"{run.name!r} and its baselines have no step in common")
    names = _names(run, others, metrics)
    shifts = [_shift(name, run, others, steps) for name in names if not is_cost(name)]
    shifts = _judged([shift for shift in shifts if shift is not None], alpha)
    nearest, equal, first, parted = _first_difference(run, others, steps, shifts)
    return Comparison(
        candidate=run.name,
        baselines=tuple(other.name for other in others),
        steps=len(steps),
        equal_steps=equal,
        nearest=nearest,
        first=first,
        first_metrics=parted,
        metrics=tuple(sorted(shifts, key=lambda shift: (shift.verdict != "change", shift.p, shift.name))),
        costs=tuple(filter(None, (_cost(name, run, others, steps) for name in names if is_cost(name)))),
        alpha=alpha,
    )


def _histories(given: History | Path | str) -> list[History]:
    return [given] if isinstance(given, History) else read_histories(Path(given))


def _one(given: History | Path | str) -> History:
    found = _histories(given)
    if len(found) != 1:
        raise ConfigError(
            f"{str(given)!r} holds {len(found)} runs, and one is compared with the others; give a run's directory "
            "last, stored histories before it"
        )
    return found[0]


def _names(run: History, others: Sequence[History], wanted: Sequence[str]) -> list[str]:
    known = {name for history in (run, *others) for name in history.metrics}
    for name in wanted:
        if name not in known:
            raise ConfigError(f"no run has the metric {name!r}; there are {', '.join(sorted(known))}")
    return sorted(wanted or known)


def _shift(name: str, run: History, others: Sequence[History], steps: Sequence[int]) -> MetricShift | None:
    """How a metric differs, with a probability that is not corrected yet; None if it does not differ."""
    if name not in run.metrics:
        return _lost(name, others, "the run does not have it")
    if any(name not in other.metrics for other in others):
        return _lost(name, [run], "only the run has it", verdict="noise")
    own = run.metrics[name]
    common = [step for step in steps if step in own and all(step in other.metrics[name] for other in others)]
    values = np.array([own[step] for step in common])
    bands = np.array([[other.metrics[name][step] for step in common] for other in others])
    if not common or all(_same(values, band) for band in bands):
        return None
    differing = (step for step, a, b in zip(common, values, bands[0], strict=True) if not _same(a, b))
    first = next(differing, None)
    if not np.isfinite(values).all() and np.isfinite(bands).all():
        at = common[int(np.argmin(np.isfinite(values)))]
        return _lost(name, others, f"not finite from step {at}", first=first, steps=len(common))
    finite = np.isfinite(values) & np.isfinite(bands).all(axis=0)
    if not finite.any():
        return None
    return _measured(name, first, values[finite], bands[:, finite], np.array(common)[finite])


def _lost(
    name: str,
    histories: Sequence[History],
    remark: str,
    *,
    verdict: Verdict = "change",
    first: int | None = None,
    steps: int = 0,
) -> MetricShift:
    """A metric that cannot be compared, or whose difference needs no test."""
    found = [value for history in histories for value in history.metrics.get(name, {}).values()]
    finite = [value for value in found if math.isfinite(value)]
    mean = float(np.mean(finite)) if finite else math.nan
    only = verdict == "noise"
    return MetricShift(
        name=name,
        verdict=verdict,
        steps=steps,
        first=first,
        baseline=math.nan if only else mean,
        candidate=mean if only else math.nan,
        shift=0.0,
        noise=0.0,
        p=1.0 if only else 0.0,
        outside=None,
        remark=remark,
    )


def _measured(
    name: str, first: int | None, values: np.ndarray, bands: np.ndarray, steps: np.ndarray
) -> MetricShift:
    """The verdict is open yet: `noise` if the shift is too small to be one, else `change`."""
    differences = values - bands.mean(axis=0)
    p, begin = _likeliest_change(values, bands)
    differing = differences[begin:][differences[begin:] != 0]
    shift = float(np.median(differing)) if len(differing) else 0.0
    noise = max(step_noise(band) for band in bands)
    if len(bands) > 1:
        noise = max(noise, math.sqrt(float(bands.var(axis=0, ddof=1).mean())))
    size = float(np.abs(bands).max())
    small = abs(shift) <= max(_SAME * size, _LEAST_SHARE * noise)
    given = name in _GIVEN and abs(differences).max() > _SAME * size
    limit = max(_OUTSIDE * math.sqrt(1 + 1 / len(bands)) * noise, _SAME * size)
    outside = np.flatnonzero(np.abs(differences) > limit)
    return MetricShift(
        name=name,
        verdict="noise" if small and not given else "change",
        steps=len(steps),
        first=first,
        baseline=float(bands.mean()),
        candidate=float(values.mean()),
        shift=shift,
        noise=noise,
        p=0.0 if given else p,
        outside=int(steps[outside[0]]) if len(outside) else None,
        remark="follows from the settings" if given else "",
    )


def _likeliest_change(values: np.ndarray, bands: np.ndarray) -> tuple[float, int]:
    """The probability of a metric's differences, and the place from which on it was taken.

    All steps are looked at, their second half and their last quarter, so that a change need not have been there
    from the beginning; the smallest probability counts, times the number of looks.
    """
    steps = len(values)
    begins = [begin for begin in (0, steps // 2, steps - steps // 4) if begin == 0 or steps - begin >= _SHORTEST]
    looks = []
    for begin in begins:
        part, band = values[begin:], bands[:, begin:]
        looks.append((paired_p(part - band[0]) if len(bands) == 1 else band_p(part, band), begin))
    p, begin = min(looks)
    return min(1.0, p * len(looks)), begin


def _judged(shifts: Sequence[MetricShift], alpha: float) -> list[MetricShift]:
    """The shifts with corrected probabilities; a change needs a small one."""
    corrected = holm({shift.name: shift.p for shift in shifts})
    return [
        replace(
            shift,
            p=corrected[shift.name],
            verdict="change" if shift.verdict == "change" and corrected[shift.name] <= alpha else "noise",
        )
        for shift in shifts
    ]


def _first_difference(
    run: History, others: Sequence[History], steps: Sequence[int], shifts: Sequence[MetricShift]
) -> tuple[str, int, int | None, tuple[str, ...]]:
    """The baseline that the run equals longest, for how many steps, and what differs at the first other step."""
    sizes = {shift.name: abs(shift.shift_in_noise) for shift in shifts}
    comparable = {shift.name for shift in shifts if shift.steps}
    names = [name for name in sizes if name in comparable and not name.startswith(_LOOSE)]
    nearest = (others[0].name, -1, None, ())
    for other in others:
        place, parted = _parting(run, other, steps, names)
        if place > nearest[1]:
            ordered = tuple(sorted(parted, key=lambda name: (-sizes[name], name)))
            nearest = (other.name, place, steps[place] if parted else None, ordered)
    return nearest


def _parting(run: History, other: History, steps: Sequence[int], names: Sequence[str]) -> tuple[int, list[str]]:
    """How many steps two runs are equal for, and what differs at the next; nothing if there is no next."""
    for place, step in enumerate(steps):
        parted = [name for name in names if not _same(run.metrics[name].get(step), other.metrics[name].get(step))]
        if parted:
            return place, parted
    return len(steps), []


def _cost(name: str, run: History, others: Sequence[History], steps: Sequence[int]) -> CostRatio | None:
    own = [run.metrics.get(name, {}).get(step, math.nan) for step in steps]
    theirs = [other.metrics.get(name, {}).get(step, math.nan) for other in others for step in steps]
    before, now = ([value for value in values if math.isfinite(value)] for values in (theirs, own))
    if not before or not now:
        return None
    return CostRatio(name=name, baseline=float(np.median(before)), candidate=float(np.median(now)))


def _same(a: object, b: object) -> bool:
    """Bit-equal; NaN is like NaN, and what is missing like what is missing."""
    if a is None or b is None:
        return a is b
    return bool(np.array_equal(np.asarray(a, float), np.asarray(b, float), equal_nan=True))
