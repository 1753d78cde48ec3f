"""Data parallelism over torch.distributed: the few collectives that training needs."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist
from rlhf_core import OneRank, Ranks
from torch import Tensor

_BUCKET_ELEMENTS = 16 << 20


class TorchRanks:
    """`rlhf_core.Ranks` over the default process group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def size(self) -> int:
        """See Ranks."""
        return dist.get_world_size()

    def sum(self, values: Sequence[float]) -> list[float]:
        """See Ranks."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def max(self, value: int) -> int:
        """See Ranks."""
        tensor = torch.tensor(value, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: object) -> list[object]:
        """See Ranks."""
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def join_ranks(device: torch.device) -> Ranks:
    """The ranks that `torchrun` started, or this process alone. Joins the default process group if need be."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        return OneRank()
    if not dist.is_initialized():
        # Transformers imports DeepSpeed, where installed, when it saves. Imported while there is a group,
        # DeepSpeed keeps it in defaults of arguments: it outlives its end, and its threads may abort the exit.
        if find_spec("deepspeed") is not None:
            import_module("deepspeed")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        # Several engines of one process share the group, so none of them can be the one to end it.
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return TorchRanks(device) if dist.get_world_size() > 1 else OneRank()


def rank_of(ranks: Ranks) -> int:
    """This process's place among `ranks`."""
    return dist.get_rank() if ranks.size > 1 else 0


def average_gradients(parameters: Iterable[Tensor], ranks: Ranks) -> None:
    """Replace every gradient by its mean over the ranks, in flat buffers of up to 64 MiB."""
    if ranks.size == 1:
        return
    bucket: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            # Another rank may have a gradient here (an expert that no token of ours was routed to).
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (
            sum(g.numel() for g in bucket) + parameter.grad.numel() > _BUCKET_ELEMENTS
            or bucket[0].dtype != parameter.grad.dtype
        ):
            _reduce(bucket, ranks.size)
            bucket = []
        bucket.append(parameter.grad)
    if bucket:
        _reduce(bucket, ranks.size)


def _reduce(gradients: list[Tensor], size: int) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= size
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
