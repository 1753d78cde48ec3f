"""ZeRO-3 shards of all ranks brought straight to their places in a buffer of rank 0.

A gather by DeepSpeed makes full copies on all ranks, of which only the rank that sends the weights has a use. Here
each shard crosses once, from where it lies to where it belongs, and nothing is allocated. Gloo only: over NCCL
the engine's own all-gather is used, whose cost is small there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def reachable(parameter: Any) -> bool:
    """Whether the parameter is sharded over all ranks in host memory, with its values as they are."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None or hasattr(shard, "ds_quant_scale") or shard.final_location is not None:
        return False
    group = parameter.ds_process_group
    distributed: Any = torch.distributed
    return (
        shard.device.type == "cpu"
        and shard.dtype == parameter.dtype
        and distributed.get_world_size(group) == distributed.get_world_size()
        and distributed.get_backend(group) == "gloo"
    )


def collect(parameters: Sequence[Any], places: Sequence[Tensor] | None) -> None:
    """Bring full parameters to rank 0; all ranks at once, with the same `reachable` parameters.

    Args:
        parameters: the parameters.
        places: on rank 0 where each belongs, contiguous and of its full shape; None on the others.
    """
    distributed: Any = torch.distributed
    rank = distributed.get_rank()
    works = []
    if places is None:
        for parameter in parameters:
            own = _slice_of(rank, parameter)
            if own.stop > own.start:
                shard = parameter.ds_tensor.detach()[: own.stop - own.start]
                works.append(distributed.isend(shard, dst=0, group=parameter.ds_process_group))
    else:
        flats = [place.view(-1) for place in places]
        for parameter, flat in zip(parameters, flats, strict=True):
            for source in range(1, distributed.get_world_size()):
                theirs = _slice_of(source, parameter)
                if theirs.stop > theirs.start:
                    works.append(distributed.irecv(flat[theirs], src=source, group=parameter.ds_process_group))
        for parameter, flat in zip(parameters, flats, strict=True):  # while the others' are on their way
            own = _slice_of(0, parameter)
            flat[own].copy_(parameter.ds_tensor.detach()[: own.stop])
    for work in works:
        work.wait()


def _slice_of(rank: int, parameter: Any) -> slice:
    """What a rank holds of the flattened parameter: shards of equal length, the last ones padded."""
    size, total = parameter.ds_tensor.ds_numel, parameter.ds_numel
    return slice(min(rank * size, total), min((rank + 1) * size, total))
