"""A comparison of runs in words and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from rlhf_launch.comparison.compare import Comparison, MetricShift
from rlhf_launch.tables import aligned

_SHOWN = 12
_FEW_STEPS = 20
_FEW_BASELINES = 5


def print_comparison(comparison: Comparison, console: Console, *, every: bool = False) -> None:
    """Print where a run parts from its baselines, the metrics that differ, and the verdict.

    Args:
        comparison: what `compare_runs` found.
        console: where to.
        every: print all metrics that differ, not the first dozen.
    """
    others = ", ".join(comparison.baselines)
    console.print(
        f"{comparison.candidate} beside {others}: {comparison.steps} common steps", soft_wrap=True, markup=False
    )
    console.print(_parting(comparison), soft_wrap=True, markup=False)
    shown = comparison.metrics if every else comparison.metrics[:_SHOWN]
    if shown:
        console.print(_shift_table(shown), soft_wrap=True, markup=False)
    if hidden := len(comparison.metrics) - len(shown):
        console.print(f"  and {hidden} more that differ, by less (--all prints them)")
    if comparison.costs:
        console.print("time and memory, without a verdict:")
        console.print(_cost_table(comparison), soft_wrap=True, markup=False)
    console.print(verdict_line(comparison), soft_wrap=True, markup=False)


def verdict_line(comparison: Comparison) -> str:
    """The verdict as one line."""
    changed = [metric.name for metric in comparison.metrics if metric.verdict == "change"]
    if comparison.verdict == "equal":
        return "equal: every metric has the same bits at every step"
    if comparison.verdict == "change":
        return f"change: {', '.join(changed)} (at a false-alarm rate of {comparison.alpha:g})"
    parted, few = comparison.steps - comparison.equal_steps, ""
    if 1 < len(comparison.baselines) < _FEW_BASELINES:
        few = (
            f"; {len(comparison.baselines)} baselines tell large changes only, give one or from {_FEW_BASELINES} on"
        )
    elif parted < _FEW_STEPS:
        few = f"; {parted} steps that differ are few to tell a change by"
    return f"noise: no metric differs by more than chance explains{few}"


def _parting(comparison: Comparison) -> str:
    if comparison.first is None:
        return f"bit-equal to {comparison.nearest} at all {comparison.steps} steps"
    before = (
        f"bit-equal to {comparison.nearest} for {comparison.equal_steps} step(s)"
        if comparison.equal_steps
        else f"not equal to {comparison.nearest} at any step before"
    )
    first, *others = comparison.first_metrics
    more = f" and {len(others)} other metric(s)" if others else ""
    return f"the first difference is at step {comparison.first}, in {first}{more}; {before}"


def _shift_table(metrics: Sequence[MetricShift]) -> str:
    rows = [("metric", "first", "baseline", "run", "shift/noise", "outside", "p", "verdict")]
    for metric in metrics:
        numbers = (f"{metric.baseline:.5g}", f"{metric.candidate:.5g}", f"{metric.shift_in_noise:+.2g}")
        verdict = f"{metric.verdict} ({metric.remark})" if metric.remark else metric.verdict
        rows.append((metric.name, _step(metric.first), *numbers, _step(metric.outside), f"{metric.p:.2g}", verdict))
    return aligned(rows, right=range(1, 7))


def _cost_table(comparison: Comparison) -> str:
    ordered = sorted(comparison.costs, key=lambda cost: -abs(math.log(cost.ratio)) if cost.ratio > 0 else 0.0)
    rows = [("metric", "baseline", "run", "ratio")]
    rows += [
        (cost.name, f"{cost.baseline:.4g}", f"{cost.candidate:.4g}", f"{cost.ratio:.2f}")
        for cost in ordered[:_SHOWN]
    ]
    return aligned(rows, right=range(1, 4))


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)
