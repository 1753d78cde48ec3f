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


def collect(parameters: Sequence[Any], places: Sequence[Tensor] | None, part: slice | None = None) -> None:
    """Bring full parameters to rank 0; all ranks at once, with the same `reachable` parameters.

    Args:
        parameters: the parameters.
        places: on rank 0 where each belongs, contiguous and of its full shape; None on the others.
        part: only these values of each flattened parameter, for which the places are then made.
    """
    distributed: Any = torch.distributed
    rank = distributed.get_rank()
    works = []
    if places is None:
        for parameter in parameters:
            shard, _ = _held(rank, parameter, part)
            if shard.stop > shard.start:
                shard = parameter.ds_tensor.detach()[shard]
                works.append(distributed.isend(shard, dst=0, group=parameter.ds_process_group))
    else:
        flats = [place.view(-1) for place in places]
        for parameter, flat in zip(parameters, flats, strict=True):
            for source in range(1, distributed.get_world_size()):
                _, theirs = _held(source, parameter, part)
                if theirs.stop > theirs.start:
                    works.append(distributed.irecv(flat[theirs], src=source, group=parameter.ds_process_group))
        for parameter, flat in zip(parameters, flats, strict=True):  # while the others' are on their way
            shard, own = _held(0, parameter, part)
            flat[own].copy_(parameter.ds_tensor.detach()[shard])
    for work in works:
        work.wait()


def _held(rank: int, parameter: Any, part: slice | None) -> tuple[slice, slice]:
    """What a rank holds of a part: where in its shard, and where in the part.

    Shards of the flattened parameter have equal lengths, the last ones are padded.
    """
    size, total = parameter.ds_tensor.ds_numel, parameter.ds_numel
    first, end = (0, total) if part is None else (part.start, part.stop)
    start = min(max(rank * size, first), end)
    stop = max(start, min((rank + 1) * size, end))
    return slice(start - rank * size, stop - rank * size), slice(start - first, stop - first)
