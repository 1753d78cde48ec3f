"""Predicted seconds of the eight published runs, each from the other three of its system: leave one out.

    python benchmarks/plan_seconds.py

Needs no model and no accelerator. Prints measured and predicted seconds by phase, how far each is off, and the
error of each phase that `rlhf plan` prints as a bar.
"""

from __future__ import annotations

import math

from rlhf_launch.planning.calibration import left_out, published_calibration, published_points
from rlhf_launch.planning.published import PHASES, RUNS, System


def main() -> None:
    """Print the tables."""
    systems: tuple[System, ...] = ("openrlhf", "deepspeed-chat")
    misses: dict[tuple[str, str], float] = {}
    for system in systems:
        runs = [run for run in RUNS if run.system == system]
        for phase in PHASES:
            for run, miss in zip(runs, left_out(published_points(system, phase)), strict=True):
                misses[run.name, phase] = miss
    print(f"{'run':22}" + "".join(f"{phase + ' (s)':>32}" for phase in (*PHASES, "step")))
    print(f"{'':22}" + "".join(f"{'measured':>12}{'predicted':>11}{'off by':>9}" for _ in range(5)))
    for run in RUNS:
        wanted = dict(zip(PHASES, run.seconds, strict=True))
        found = {phase: seconds * math.exp(misses[run.name, phase]) for phase, seconds in wanted.items()}
        wanted["step"], found["step"] = sum(wanted.values()), sum(found.values())  # type: ignore[index]
        cells = (f"{wanted[p]:12,.0f}{found[p]:11,.0f}{found[p] / wanted[p] - 1:+9.0%}" for p in wanted)
        print(f"{run.name:22}" + "".join(cells))
    for system in systems:
        lines = published_calibration(system).lines
        text = ", ".join(f"{phase} a factor of {math.exp(line.error):.2f}" for phase, line in lines.items())
        print(f"{system}: {text}")


if __name__ == "__main__":
    main()
