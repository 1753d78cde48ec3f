"""Where offline training gets its engines from: this process, or wherever a launcher puts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlhf_core import ConfigError, EngineConfig, FittedTokens, MeasuresMicroBatches, TrainEngine

from rlhf_algos.torch_engine.engine import TorchEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFactory:
    """Opens the engines of a run: the one that is trained, and before it the frozen reference.

    >>> train(config, engines=EngineFactory(open=lambda engine_config: MyEngine(engine_config)))   # doctest: +SKIP
    """

    open: Callable[[EngineConfig], TrainEngine] = TorchEngine
    """From the engine's configuration to the engine, ready for use."""
    ranks: int = 1
    """Ranks among which an engine deals out the rows it is given; every step has at least one example for each."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"engines: ranks must be at least 1, got {self.ranks}")

    def start(self, config: EngineConfig) -> TrainEngine:
        """Open an engine that can do what its configuration asks for.

        Raises:
            ConfigError: the engine does not measure, and `max_tokens_per_micro_batch` is `auto`.
        """
        engine = self.open(config)
        if config.max_tokens_per_micro_batch == "auto" and not isinstance(engine, MeasuresMicroBatches):
            engine.close()
            raise ConfigError(
                f"{type(engine).__name__} cannot find out how many tokens fit its memory; write a number for "
                "train.max_tokens_per_micro_batch"
            )
        return engine


def tokens_of_steps(engine: TrainEngine) -> FittedTokens | None:
    """The size of the micro-batches of its steps, if an engine found it by a trial."""
    return engine.fitted_tokens().get("step") if isinstance(engine, MeasuresMicroBatches) else None
