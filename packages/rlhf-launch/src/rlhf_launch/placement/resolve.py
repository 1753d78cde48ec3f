"""Which parts a run uses, chosen by what is installed, with the reason for each choice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal, Protocol

from rlhf_algos import ModelSection, TrainSection, choose_device, choose_dtype
from rlhf_core import ROLLOUT_BACKENDS, TRAIN_ENGINES, DType, PluginError, ResourceError, load_plugin

from rlhf_launch.config.placement import OnlinePlacementSection
from rlhf_launch.config.reward import RewardSection
from rlhf_launch.config.rollout import RolloutSection
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement.layout import Host
from rlhf_launch.placement.ray import cluster_hosts
from rlhf_launch.placement.ray_address import check_address, cluster_address


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedBackends:
    """The parts of a run. `reasons` holds one line for each."""

    executor: Literal["local", "ray"]
    engine: str
    backend: str
    device: Literal["cpu", "cuda"]
    dtype: DType
    reasons: tuple[str, ...]
    images: bool = False
    """Whether prompts have images, so that the training engines must see them."""


class WorkerNeeds(Protocol):
    """What a configuration says about workers: a run's, or that of batch generation."""

    @property
    def model(self) -> ModelSection:
        """The models."""
        ...

    @property
    def reward(self) -> RewardSection | None:
        """The reward, of which some parts need engines."""
        ...

    @property
    def rollout(self) -> RolloutSection:
        """How samples are generated."""
        ...

    @property
    def train(self) -> TrainSection:
        """The training engines."""
        ...

    @property
    def placement(self) -> OnlinePlacementSection:
        """Where workers run."""
        ...

    @property
    def shared(self) -> tuple[frozenset[str], ...]:
        """Sets of roles that sit on the same devices."""
        ...

    @property
    def seed(self) -> int:
        """Seed of everything."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample, or of the longest episode."""
        ...


def resolve_backends(
    config: WorkerNeeds, *, trains: bool = True, hosts: Sequence[Host] | None = None
) -> ResolvedBackends:
    """Resolve every `auto`. Nothing heavy is imported.

    Args:
        config: what is asked for.
        trains: False where no policy is trained.
        hosts: where the workers will be; looked for if not given.

    Raises:
        PluginError: a part is asked for by name and not installed.
        ConfigError: `placement.ray_address` is no address.
        ResourceError: cuda is asked for and there is none, several ranks without Ray, or no cluster answers.
    """
    reasons: list[str] = []
    executor = _pick("placement", config.placement.executor, "ray", "local", "all in one process", reasons)
    engine = _pick("training", config.train.engine, "deepspeed", "torch", "single-process torch", reasons)
    backend = _pick("rollout", config.rollout.backend, "vllm", "transformers", "readable, slower", reasons)
    asked = config.placement.device
    if hosts is None and executor == "ray" and asked != "cpu":
        hosts = hosts_there(config.placement.ray_address)
    elif hosts is None and executor == "ray":
        check_cluster(config.placement.ray_address)
    load_plugin_checked(TRAIN_ENGINES, engine)
    load_plugin_checked(ROLLOUT_BACKENDS, backend)
    ranks = {"train.ranks": config.train.ranks if trains else 1}
    for name, part in (config.reward or RewardSection()).engine_parts().items():
        load_plugin_checked(TRAIN_ENGINES, part.engine or engine)
        placed = config.placement.reward.get(name)
        ranks[f"placement.reward.{name}.ranks"] = (placed and placed.ranks) or 1
    most = max(ranks, key=lambda key: ranks[key])
    if executor == "local" and (ranks[most] > 1 or config.rollout.engines > 1):
        raise ResourceError(
            f"the local executor runs one rank and one engine in this process; {most}={ranks[most]} "
            f"and rollout.engines={config.rollout.engines} need placement.executor=ray"
        )
    device = choose_device(asked, gpus=None if hosts is None else sum(host.gpus for host in hosts))
    dtype = choose_dtype(config.model.dtype, device)
    reasons.append(f"device: {device}" + (" (there is no GPU)" if asked == "auto" and device == "cpu" else ""))
    reasons.append(f"dtype: {dtype}" + (f" (auto on {device})" if config.model.dtype == "auto" else ""))
    return ResolvedBackends(
        executor=executor,  # type: ignore[arg-type]
        engine=engine,
        backend=backend,
        device=device,
        dtype=dtype,
        reasons=tuple(reasons),
    )


def check_cluster(ray_address: str | None) -> None:
    """Knock at the cluster that would be joined, if one would.

    Raises:
        ConfigError: the address is none.
        ResourceError: no cluster answers there.
    """
    if (address := cluster_address(ray_address)) is not None:
        check_address(address)


def hosts_there(ray_address: str | None) -> list[Host]:
    """The hosts that workers can be on: those of the cluster that is joined, else this one.

    Raises:
        ConfigError: the address is none.
        ResourceError: no cluster answers there.
    """
    address = cluster_address(ray_address)
    if address is not None:
        check_address(address)
        return cluster_hosts(address)
    import torch

    return [Host(name="this host", gpus=torch.cuda.device_count(), cpus=os.cpu_count() or 1)]


def resolved(config: OnlineConfig, backends: ResolvedBackends) -> OnlineConfig:
    """The configuration with what was found in place of every `auto`."""
    return replace(
        config,
        model=replace(config.model, dtype=backends.dtype),
        train=replace(config.train, engine=backends.engine),
        rollout=replace(config.rollout, backend=backends.backend),
        placement=replace(config.placement, executor=backends.executor, device=backends.device),
    )


def load_plugin_checked(group: str, name: str) -> None:
    """Refuse an unknown name now; a known one is imported only in the worker that uses it."""
    if ":" not in name:
        from rlhf_core import plugin_names

        if name in plugin_names(group):
            return
    load_plugin(group, name)


def _pick(part: str, asked: str, first: str, second: str, remark: str, reasons: list[str]) -> str:
    """The part that was asked for, or the first one if installed, else the second."""
    installed = find_spec(first) is not None
    if asked == "auto":
        chosen = first if installed else second
        why = "installed" if installed else f"{first} is not installed; {remark}"
    else:
        chosen, why = asked, "as configured"
        if asked == first and not installed:
            raise PluginError(f"{part}: {first!r} is configured but not installed; install it or say {second!r}")
    reasons.append(f"{part}: {chosen} ({why})")
    return chosen
