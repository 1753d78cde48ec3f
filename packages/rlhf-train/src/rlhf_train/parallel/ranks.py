"""Joining the training ranks, and the small reductions that a step needs among them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from rlhf_core import ConfigError, EngineConfig

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_control_group: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """The place of this process among the training ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_env_vars(cls) -> RankInfo | None:
        """Read the launcher's variables; None if none of them is set (a single rank).

        Raises:
            ConfigError: only some of them are set, or one is not a number.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return None
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise ConfigError(
                f"a training rank needs the environment variables {', '.join(_VARIABLES)}; missing: "
                f"{', '.join(missing)}. Set them all, or none for a single rank"
            )
        try:
            rank, world_size, local_rank = (int(os.environ[name]) for name in _VARIABLES[:3])
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers: {error}") from None
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK={rank} is outside 0..WORLD_SIZE-1={world_size - 1}")
        return cls(rank=rank, world_size=world_size, local_rank=local_rank)


class TrainingRanks:
    """`rlhf_core.Ranks` over the training ranks. Small host-side values only, so always Gloo."""

    def __init__(self, info: RankInfo) -> None:
        self.info = info

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.info.world_size

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64)
        torch.distributed.all_reduce(total, group=_control_group)
        return total.tolist()

    def max(self, value: int) -> int:
        """Largest value of all ranks."""
        if self.size == 1:
            return value
        largest = torch.tensor([value], dtype=torch.int64)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=_control_group)
        return int(largest.item())

    def gather(self, value: object) -> list[object]:
        """Every rank's (picklable) value, on every rank, in rank order."""
        if self.size == 1:
            return [value]
        everyones: list[object] = [None] * self.size
        torch.distributed.all_gather_object(everyones, value, group=_control_group)
        return everyones

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)


def join_training_ranks(config: EngineConfig, *, timeout_s: float) -> TrainingRanks:
    """Join the process group that the environment variables name, or form a group of one.

    A process joins once and stays until it exits, whatever number of engines it opens: DeepSpeed caches handles of
    the group for the life of the process.
    """
    global _control_group
    _choose_accelerator(config)
    found = RankInfo.from_env_vars()
    info = found or RankInfo()
    distributed: Any = torch.distributed
    if not distributed.is_initialized():
        backend = "nccl" if config.device.startswith("cuda") else "gloo"
        timeout = timedelta(seconds=timeout_s)
        if config.device.startswith("cuda"):
            torch.cuda.set_device(info.local_rank)
        if found is None:
            # Port 0: the store binds a free port itself, so there is no race for it.
            store = distributed.TCPStore("127.0.0.1", 0, 1, True, timeout)
            distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            distributed.init_process_group(backend, timeout=timeout)
        atexit.register(_leave)
    if distributed.get_world_size() != info.world_size:
        raise ConfigError(
            f"this process already belongs to a group of {distributed.get_world_size()} ranks, but its environment "
            f"variables say WORLD_SIZE={info.world_size}; start a new process for another group"
        )
    if _control_group is None and info.world_size > 1:
        _control_group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    os.environ.setdefault("LOCAL_RANK", str(info.local_rank))
    _open_deepspeed_backend()
    return TrainingRanks(info)


def open_secondary_shards(ranks: TrainingRanks, size: int) -> None:
    """Let the next engine form its own groups of `size` ranks for ZeRO++'s secondary shards.

    DeepSpeed keeps these groups for the life of the process and refuses to form them a second time, for a critic
    beside a policy. Engines hold the groups they were made with, so it may forget them.

    Raises:
        ConfigError: the ranks cannot be cut into such groups.
    """
    if ranks.size % size:
        raise ConfigError(
            f"engine options: zero_hpz_partition_size {size} does not divide the {ranks.size} training ranks; give "
            "the number of ranks on one node"
        )
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def _choose_accelerator(config: EngineConfig) -> None:
    """Choose DeepSpeed's accelerator, which it fixes for the whole process when it is imported."""
    wanted = config.device.split(":")[0]
    if wanted not in ("cpu", "cuda"):
        raise ConfigError(f"the deepspeed engine runs on 'cpu' or 'cuda', got device={config.device!r}")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' is asked for, but torch sees no CUDA device; set device: cpu")
    os.environ.setdefault("DS_ACCELERATOR", wanted)
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    if (name := accelerator._name) != wanted:
        raise ConfigError(
            f"DeepSpeed runs this process on {name!r}, but the engine's device is {config.device!r}; set "
            f"DS_ACCELERATOR={wanted} before the process starts (see rlhf_train.env_vars)"
        )


def _open_deepspeed_backend() -> None:
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    # The shared-memory all-reduce serves DeepSpeed's inference only, but its C++ would be compiled here.
    compatible = getattr(deepspeed.ops, "__compatible_ops__", {})
    accelerator: Any = get_accelerator()
    builder = accelerator.create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        compatible[builder.NAME] = False
    deepspeed.init_distributed(
        dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
    )


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
