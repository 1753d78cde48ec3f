"""A comparison of runs in words and tables."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from rlhf_launch.comparison.compare import Comparison, MetricShift

_SHOWN = 12
_FEW_STEPS = 20
_FEW_BASELINES = 5
_WIDTH = 160
"""Names are printed whole, also where the output is no terminal."""


def print_comparison(comparison: Comparison, console: Console, *, every: bool = False) -> None:
    """Print where a run parts from its baselines, the metrics that differ, and the verdict.

    Args:
        comparison: what `compare_runs` found.
        console: where to.
        every: print all metrics that differ, not the first dozen.
    """
    others = ", ".join(comparison.baselines)
    console.print(f"{comparison.candidate} beside {others}: {comparison.steps} common steps", soft_wrap=True)
    console.print(_parting(comparison), soft_wrap=True)
    shown = comparison.metrics if every else comparison.metrics[:_SHOWN]
    if shown:
        console.print(_shift_table(shown), width=max(console.width, _WIDTH), crop=False)
    if hidden := len(comparison.metrics) - len(shown):
        console.print(f"  and {hidden} more that differ, by less (--all prints them)")
    if comparison.costs:
        console.print(_cost_table(comparison), width=max(console.width, _WIDTH), crop=False)
    console.print(verdict_line(comparison), soft_wrap=True)


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


def _shift_table(metrics: tuple[MetricShift, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("metric", "first", "baseline", "run", "shift/noise", "outside", "p", "verdict"):
        table.add_column(title, no_wrap=True, justify="left" if title in ("metric", "verdict") else "right")
    for metric in metrics:
        verdict = f"{metric.verdict} ({metric.remark})" if metric.remark else metric.verdict
        table.add_row(
            metric.name,
            _step(metric.first),
            f"{metric.baseline:.5g}",
            f"{metric.candidate:.5g}",
            f"{metric.shift_in_noise:+.2g}",
            _step(metric.outside),
            f"{metric.p:.2g}",
            verdict,
        )
    return table


def _cost_table(comparison: Comparison) -> Table:
    table = Table(title="time and memory, without a verdict", title_justify="left", box=None, pad_edge=False)
    table.add_column("metric", no_wrap=True)
    for title in ("baseline", "run", "ratio"):
        table.add_column(title, no_wrap=True, justify="right")
    ordered = sorted(comparison.costs, key=lambda cost: -abs(math.log(cost.ratio)) if cost.ratio > 0 else 0.0)
    for cost in ordered[:_SHOWN]:
        table.add_row(cost.name, f"{cost.baseline:.4g}", f"{cost.candidate:.4g}", f"{cost.ratio:.2f}")
    return table


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)
