"""A layout for a run that says nothing of numbers and places: one that fills the GPUs that there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rlhf_core import TRAIN_ENGINES, EngineConfig, load_plugin

from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement.layout import Host
from rlhf_launch.placement.resolve import hosts_there

_SLEEPS = "vllm"
"""The backend whose engines make way for those that share their GPUs."""


def filled_here(config: OnlineConfig) -> tuple[OnlineConfig, str | None]:
    """`filled` for the hosts that are there; they are looked at only if the configuration leaves the layout open.

    Raises:
        UserError: the cluster that is named does not answer.
    """
    placement = config.placement
    settled = placement.layout == "written" or placement.device == "cpu" or placement.executor == "local"
    if settled or says_where(config):
        return config, None
    return filled(config, hosts_there(placement.ray_address))


def filled(config: OnlineConfig, hosts: Sequence[Host]) -> tuple[OnlineConfig, str | None]:
    """The run with a layout that fills the GPUs of these hosts, and what was chosen and why.

    Where generation and training alternate, every role sits on all GPUs, in turns: on GPUs of its own each would
    wait half of the time. Where they overlap, half of the GPUs generate, and the roles of training share the
    others.

    Args:
        config: left as it is if it says anything of numbers or places (`says_where`), or says `layout: written`.
        hosts: where the run can be.
    """
    gpus = [host.gpus for host in hosts if host.gpus]
    if not gpus or config.placement.layout == "written" or says_where(config):
        return config, None
    rollout = config.rollout
    if not _has_ranks(config, sum(gpus)) or (rollout.overlap is None and rollout.backend_name != _SLEEPS):
        return config, None
    size = rollout.tensor_parallel_size * rollout.pipeline_parallel_size
    unit = math.lcm(size, config.train.sequence_parallel_size)
    units = sum(count // unit for count in gpus)
    generating = units // 2 if rollout.overlap is not None else units
    training = units - generating if rollout.overlap is not None else units
    if not generating or not training:
        return config, None  # refused below, with the numbers
    shared = [role for role in config.roles if role != "policy" and (role != "rollout" or rollout.overlap is None)]
    placement = config.placement
    for role in shared:
        placement = placement.sharing(role, "policy")
    chosen = replace(
        config,
        train=replace(config.train, ranks=_ranks(config, training * unit)),
        rollout=replace(rollout, engines=generating * unit // size),
        placement=replace(placement, layout="written"),
    )
    where = f"{sum(gpus)} GPU(s) on {len(gpus)} host(s)"
    if rollout.overlap is None:
        what = "every role on all of them, in turns, since generation and training alternate"
    else:
        what = f"{generating * unit} of them generate while the others train"
    return chosen, f"layout: {where}: {what} (placement.layout: written keeps to the file)"


def says_where(config: OnlineConfig) -> bool:
    """Whether a configuration says how many workers there are, or where one sits."""
    return config.train.ranks > 1 or config.rollout.engines > 1 or not config.placement.says_nothing_of_roles


def _has_ranks(config: OnlineConfig, gpus: int) -> bool:
    """Whether the training engine can have as many ranks as there are GPUs."""
    engine = load_plugin(TRAIN_ENGINES, config.train.engine_name)
    return gpus == 1 or engine.capabilities(EngineConfig(model=config.model.path)).several_ranks


def _ranks(config: OnlineConfig, gpus: int) -> int:
    """As many ranks as GPUs, or as have a sample each in every minibatch."""
    samples = config.train.prompts_per_step * config.rollout.samples_per_prompt
    together = config.train.sequence_parallel_size
    return max(together, min(gpus, samples // config.train.minibatches) // together * together)
