"""Learning rate as a function of the number of optimizer steps taken."""

from __future__ import annotations

import math

from rlhf_core import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps_taken: int) -> float:
    """Learning rate of the next optimizer step, `steps_taken` having been taken before it.

    Warm-up is linear from 0 (which no step uses: the first of n warm-up steps has 1/n of the rate), then constant,
    linear or half a cosine down to `min_learning_rate_ratio` at `total_steps`, and that ratio from there on.

    >>> config = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2, total_steps=6)
    >>> [learning_rate(config, step) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if steps_taken < config.warmup_steps:
        return config.learning_rate * (steps_taken + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = (steps_taken - config.warmup_steps) / (config.total_steps - config.warmup_steps)
    done = min(done, 1.0)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    floor = config.min_learning_rate_ratio
    return config.learning_rate * (floor + (1 - floor) * left)
