"""Offline methods of rlhf-algos on ranks that Ray places: the same loop, another source of engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rlhf_algos import EngineFactory, OfflineConfig, OfflineEvent, TrainResult, train
from rlhf_core import (
    TRAIN_ENGINES,
    CapabilityError,
    ConfigError,
    EngineConfig,
    TrainCapabilities,
    WeightSource,
)

from rlhf_launch.placement.executor import Executor, WorkerRoom
from rlhf_launch.placement.plans import rank_plans
from rlhf_launch.placement.resolve import load_plugin_checked
from rlhf_launch.placement.start import open_executor
from rlhf_launch.workers.train_group import TrainGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleSection:
    """Which engine trains, in how many processes, and where these run."""

    engine: str = "auto"
    """`auto` (deepspeed where installed, else torch), an installed engine's name, or `module:Class`."""
    ranks: int = 1
    """Data-parallel ranks; under ZeRO-3 they hold one copy of the model together."""
    sequence_parallel_size: int = 1
    """Consecutive ranks that share their rows, each with a slice of the tokens; for long rows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the engine (for deepspeed: stage, offload_optimizer, ...)."""
    executor: Literal["auto", "local", "ray"] = "auto"
    """`local`: in this process; `ray`: an actor per rank; `auto`: ray for several ranks or a given cluster."""
    ray_address: str | None = None
    """An existing cluster (`auto` finds one on this host); null starts a local one."""
    cpus_per_worker: float = 0.25
    """CPU cores reserved per rank."""
    gpus_per_worker: float = 1.0
    """GPUs reserved per rank (on cuda)."""
    timeout_s: float = 1800.0
    """Deadline of every wait on the ranks."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"scale.ranks must be at least 1, got {self.ranks}")
        if self.ranks > 1 and self.executor == "local":
            raise ConfigError(
                f"scale.executor: local runs one rank in this process; scale.ranks={self.ranks} needs ray"
            )

    @property
    def on_ray(self) -> bool:
        """Whether Ray places the ranks."""
        return self.executor == "ray" or (
            self.executor == "auto" and (self.ranks > 1 or self.ray_address is not None)
        )

    @property
    def engine_name(self) -> str:
        """The engine, `auto` resolved."""
        if self.engine != "auto":
            return self.engine
        return "deepspeed" if find_spec("deepspeed") is not None else "torch"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledOfflineConfig(OfflineConfig):
    """A run of `rlhf offline <method>`: all keys of rlhf-algos, and `scale`."""

    scale: ScaleSection = field(default_factory=ScaleSection)

    def __post_init__(self) -> None:
        OfflineConfig.__post_init__(self)


def train_offline(config: ScaledOfflineConfig, *, on_event: OfflineEvent | None = None) -> TrainResult:
    """Run an offline method on the engine and the ranks that `config.scale` names.

    Raises:
        UserError: something in the configuration or the data; before any model is loaded.
        RLHFError: something failed while running.
    """
    load_plugin_checked(TRAIN_ENGINES, config.scale.engine_name)
    with _engines(config.scale) as engines:
        return train(_absolute(config), on_event=on_event, engines=engines)


def _absolute(config: ScaledOfflineConfig) -> ScaledOfflineConfig:
    """Paths that mean the same in workers with another working directory."""
    models = {
        name: str(Path(path).absolute())
        for name in ("model", "reference")
        if (path := getattr(config, name)) is not None and Path(path).is_dir()
    }
    return replace(config, output=config.output.absolute(), **models)


@contextmanager
def _engines(scale: ScaleSection) -> Iterator[EngineFactory]:
    """Engines on placed ranks; whatever of them is still open is closed when the block ends."""
    with ExitStack() as stack:

        def open_engine(config: EngineConfig) -> PlacedEngine:
            placed = replace(config, options=scale.options, sequence_parallel_size=scale.sequence_parallel_size)
            engine = PlacedEngine(placed, scale, _executor(scale))
            stack.callback(engine.close)
            engine.start()
            return engine

        if scale.on_ray:
            # Ray stays up from the first engine to the last: the object that starts it is the last to be closed.
            stack.callback(_executor(scale).close)
        yield EngineFactory(open=open_engine, ranks=scale.ranks)


def _executor(scale: ScaleSection) -> Executor:
    kind = "ray" if scale.on_ray else "local"
    return open_executor(kind, ray_address=scale.ray_address, timeout_s=scale.timeout_s)


class PlacedEngine(TrainGroup):
    """A `TrainEngine` whose ranks live in workers of its own; these end with it."""

    @staticmethod
    def capabilities(config: EngineConfig) -> TrainCapabilities:
        """See TrainEngine. What the ranks can do beyond it cannot be called from here."""
        return TrainCapabilities()

    def __init__(self, config: EngineConfig, scale: ScaleSection, executor: Executor) -> None:
        self._executor: Executor | None = executor
        room = WorkerRoom(cpus=scale.cpus_per_worker, gpus=scale.gpus_per_worker)
        plans = rank_plans(config.role, scale.engine_name, config, ranks=scale.ranks, room=room)
        super().__init__(config.role, executor.place(plans), timeout_s=scale.timeout_s)

    def weights(self) -> WeightSource:
        """Not here: the weights are spread over the workers, and travel by their own links."""
        raise CapabilityError("the weights of placed ranks cannot be read in this process; use export")

    def close(self) -> None:
        """See TrainEngine; ends the workers and gives their room back."""
        if self._executor is not None:
            super().close()
            self._executor.close()
            self._executor = None
