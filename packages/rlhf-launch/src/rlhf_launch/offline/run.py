"""Offline methods of rlhf-algos on ranks that Ray places: the same loop, another source of engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Literal

from rlhf_algos import EngineFactory, OfflineConfig, OfflineEvent, TrainResult, choose_device, choose_dtype, train
from rlhf_core import (
    TRAIN_ENGINES,
    CapabilityError,
    ConfigError,
    EngineConfig,
    StopRequest,
    TrainCapabilities,
    WeightSource,
)

from rlhf_launch.placement.executor import Executor, WorkerPlan, WorkerRoom
from rlhf_launch.placement.layout import Host
from rlhf_launch.placement.overview import overview
from rlhf_launch.placement.plans import rank_plans
from rlhf_launch.placement.ray_address import cluster_address
from rlhf_launch.placement.resolve import check_cluster, hosts_there, load_plugin_checked
from rlhf_launch.placement.start import open_executor
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.waits import Waits

_log = logging.getLogger(__name__)


def train_offline(
    config: OfflineConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OfflineEvent | None = None,
    say: Callable[[str], None] = _log.warning,
    stop: StopRequest | None = None,
) -> TrainResult:
    """Run an offline method on the engine, the ranks and the hosts that `train` and `placement` name.

    Args:
        config: the run.
        resume: continue the run in its output from the newest complete checkpoint.
        overwrite: move the run in its output aside, and begin anew.
        on_event: told of progress, see `rlhf_algos.OfflineEvent`.
        say: see `rlhf_algos.train`.
        stop: by which another thread may ask the run to end in good order, as signals do; see `rlhf_algos.train`.

    Raises:
        RunStopped: the run was asked to end, and did so with a checkpoint of what it had learnt.
        UserError: something in the configuration or the data; before any model is loaded.
        RLHFError: something failed while running.
    """
    if config.train.ranks > 1 and config.placement.executor == "local":
        raise ConfigError(
            f"placement.executor=local runs one rank in this process; train.ranks={config.train.ranks} needs ray"
        )
    load_plugin_checked(TRAIN_ENGINES, config.train.engine_name)
    if needs_ray(config):
        config = replace(config, placement=replace(config.placement, device=_device(config)))
    with _engines(config) as engines:
        start = {"resume": resume, "overwrite": overwrite}
        return train(config, **start, on_event=on_event, engines=engines, say=say, stop=stop)


def needs_ray(config: OfflineConfig) -> bool:
    """Whether Ray places the ranks: if it is asked for, or needed."""
    placement = config.placement
    needed = config.train.ranks > 1 or cluster_address(placement.ray_address) is not None
    return placement.executor == "ray" or (placement.executor == "auto" and needed)


def _device(config: OfflineConfig) -> Literal["cpu", "cuda"]:
    """The device of the ranks, by what the hosts have on which they will be."""
    placement = config.placement
    if placement.device == "cpu":
        check_cluster(placement.ray_address)
        return "cpu"
    return choose_device(placement.device, gpus=sum(host.gpus for host in hosts_there(placement.ray_address)))


def offline_plan(config: OfflineConfig, hosts: Sequence[Host] | None = None) -> str:
    """Where the ranks of a run would sit, and with what options; nothing is started or loaded.

    Args:
        config: the run.
        hosts: where they would be; looked for if not given.

    Raises:
        UserError: they cannot be placed there, or the engine cannot honour its settings.
    """
    if hosts is None:
        hosts = hosts_there(config.placement.ray_address)
    device = choose_device(config.placement.device, gpus=sum(host.gpus for host in hosts))
    here = replace(config, placement=replace(config.placement, device="cpu"))
    engine_config = replace(here.engine(1), device=device, dtype=choose_dtype(config.model.dtype, device))
    return overview(_plans(config, engine_config), hosts)


def _plans(run: OfflineConfig, config: EngineConfig) -> list[WorkerPlan]:
    room = WorkerRoom(cpus=run.placement.cpus_per_worker)
    return rank_plans(config.role, run.train.engine_name, config, ranks=run.train.ranks, room=room)


@contextmanager
def _engines(run: OfflineConfig) -> Iterator[EngineFactory]:
    """Engines on placed ranks; whatever of them is still open is closed when the block ends."""
    with ExitStack() as stack:

        def open_engine(config: EngineConfig) -> PlacedEngine:
            engine = PlacedEngine(config, run, _executor(run))
            stack.callback(engine.close)
            engine.start()
            return engine

        if needs_ray(run):
            # Ray stays up from the first engine to the last: the object that starts it is the last to be closed.
            stack.callback(_executor(run).close)
        yield EngineFactory(open=open_engine, ranks=run.train.ranks)


def _executor(run: OfflineConfig) -> Executor:
    kind, placement = "ray" if needs_ray(run) else "local", run.placement
    return open_executor(kind, placement=placement)


class PlacedEngine(TrainGroup):
    """A `TrainEngine` whose ranks live in workers of its own; these end with it."""

    @staticmethod
    def capabilities(config: EngineConfig) -> TrainCapabilities:
        """See TrainEngine. What the ranks can do beyond it cannot be called from here."""
        return TrainCapabilities()

    def __init__(self, config: EngineConfig, run: OfflineConfig, executor: Executor) -> None:
        self._executor: Executor | None = executor
        handles = executor.place(_plans(run, config))
        super().__init__(config.role, handles, waits=Waits(run.placement.timeout_s))

    def weights(self) -> WeightSource:
        """Not here: the weights are spread over the workers, and travel by their own links."""
        raise CapabilityError("the weights of placed ranks cannot be read in this process; use export")

    def close(self) -> None:
        """See TrainEngine; ends the workers and gives their room back."""
        if self._executor is not None:
            super().close()
            self._executor.close()
            self._executor = None
