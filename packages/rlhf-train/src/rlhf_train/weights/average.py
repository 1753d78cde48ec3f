"""Exponential moving average of the weights, each rank with a shard of it in host memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rlhf_core import CheckpointError
from torch import Tensor, nn

from rlhf_train.parallel.ranks import TrainingRanks


class AverageWeights:
    """average <- decay * average + (1 - decay) * weights, in float32, over the trained parameters.

    A rank holds the same slice of every flattened parameter, ceil(elements / ranks) long: that is how ZeRO-3
    shards them, and the other stages are cut likewise, so the memory is 4 bytes per parameter over all ranks.
    """

    def __init__(self, module: nn.Module, engine: Any, *, decay: float, ranks: TrainingRanks) -> None:
        self.decay = decay
        self._ranks = ranks
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer = engine.optimizer
        self._shards = {name: self._own(p).float().cpu().clone() for name, p in self._parameters.items()}

    @property
    def bytes(self) -> int:
        """Host memory of this rank's shards."""
        return sum(shard.numel() * shard.element_size() for shard in self._shards.values())

    def update(self) -> None:
        """Count the weights as they are after a step into the average."""
        for name, parameter in self._parameters.items():
            self._shards[name].lerp_(self._own(parameter).float().cpu(), 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model's weights are the average; all ranks enter it together."""
        before = {name: self._own(p).clone() for name, p in self._parameters.items()}
        self._write(self._shards)
        try:
            yield
        finally:
            self._write(before)

    def state(self) -> dict[str, Tensor]:
        """This rank's shards by parameter name."""
        return self._shards

    def load(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from the shards that `len(states)` ranks saved, whatever their number was.

        Raises:
            CheckpointError: they belong to other parameters.
        """
        if set(states[0]) != set(self._shards):
            different = sorted(set(states[0]) ^ set(self._shards))[:3]
            raise CheckpointError(
                "the saved average is of other parameters (among the differences: "
                f"{', '.join(different)}); resume with the same model and freeze patterns"
            )
        for name, parameter in self._parameters.items():
            whole = torch.cat([state[name] for state in states])[: _elements(parameter)]
            self._shards[name] = _slice(whole, self._ranks).clone()

    def _own(self, parameter: Any) -> Tensor:
        """This rank's slice of the flattened parameter, padded to the common length."""
        shard = getattr(parameter, "ds_tensor", None)
        return shard.data.flatten() if shard is not None else _slice(parameter.data.flatten(), self._ranks)

    def _write(self, shards: Mapping[str, Tensor]) -> None:
        # Full copies, of parameters that stay gathered or were used last, have to be made again from the shards.
        release_gathered(self._optimizer)
        for name, parameter in self._parameters.items():
            shard = getattr(parameter, "ds_tensor", None)
            if shard is not None:
                shard.data.copy_(shards[name].view_as(shard))
            else:
                whole = self._gathered(shards[name].to(parameter.device, parameter.dtype))
                parameter.data.copy_(whole[: parameter.numel()].view_as(parameter))
        if persistent := getattr(self._optimizer, "persistent_parameters", None):
            persistent[0].all_gather(persistent)

    def _gathered(self, shard: Tensor) -> Tensor:
        if self._ranks.size == 1:
            return shard
        whole = shard.new_empty(shard.numel() * self._ranks.size)
        torch.distributed.all_gather_into_tensor(whole, shard.contiguous())
        return whole


def release_gathered(optimizer: Any) -> None:
    """Drop all full copies of sharded parameters, as ZeRO-3 does before it changes the shards in a step."""
    if hasattr(optimizer, "_partition_all_parameters"):
        optimizer._partition_all_parameters()


def _elements(parameter: Any) -> int:
    return math.prod(getattr(parameter, "ds_shape", parameter.shape))


def _slice(flat: Tensor, ranks: TrainingRanks) -> Tensor:
    size = math.ceil(flat.numel() / ranks.size)
    part = flat[ranks.info.rank * size : (ranks.info.rank + 1) * size]
    return nn.functional.pad(part, (0, size - part.numel())) if part.numel() < size else part
