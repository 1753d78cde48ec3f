"""Learning rate as a function of the number of optimizer steps taken."""

from __future__ import annotations

import math

from rlhf_core.errors import ConfigError
from rlhf_core.interfaces.engine_config import OptimizerConfig

WSD_CONSTANT = 0.8
"""Share of the steps after the warm-up in which the schedule `wsd` stays at the full rate."""


def learning_rate(config: OptimizerConfig, steps_taken: int) -> float:
    """Learning rate of the next optimizer step, `steps_taken` having been taken before it.

    Warm-up is linear from 0 (which no step uses: the first of n warm-up steps has 1/n of the rate), then constant,
    or a linear, half-cosine or 1-sqrt (Haegele et al. 2024, arXiv:2405.18392) fall to `min_learning_rate_ratio` at
    `total_steps`, and that ratio from there on. `wsd` stays constant for the first 80% of what follows the warm-up
    and falls as 1-sqrt over the rest; `inverse_sqrt` falls as 1 / sqrt(steps), never below the ratio.

    >>> config = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2, total_steps=6)
    >>> [learning_rate(config, step) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if steps_taken < config.warmup_steps:
        return config.learning_rate * (steps_taken + 1) / config.warmup_steps
    floor = config.min_learning_rate_ratio
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "inverse_sqrt":
        since = max(config.warmup_steps, 1)
        return config.learning_rate * max(floor, math.sqrt(since / max(steps_taken, since)))
    if not config.total_steps:
        raise ConfigError(f"optimizer: schedule {config.schedule!r} needs total_steps, got 0")
    done = min(1.0, (steps_taken - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return config.learning_rate * (floor + (1 - floor) * _left(config.schedule, done))


def _left(schedule: str, done: float) -> float:
    """What is left of the fall from 1 to 0 after the share `done` of it."""
    if schedule == "linear":
        return 1 - done
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - math.sqrt(max(0.0, (done - WSD_CONSTANT) / (1 - WSD_CONSTANT)))
