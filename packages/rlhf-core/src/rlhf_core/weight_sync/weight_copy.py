"""A receiver's copy of the weights that it took last, for engines that cannot read back what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.weight_sync.delta import fused_group


class WeightCopy:
    """All weights as they travelled, in host memory: as many bytes as the model has.

    An engine that fuses, shards or repacks its weights has no place in which single values could be changed. It
    changes them here (see rlhf_core.weight_sync.delta, `values`), and loads what it fuses with them anew.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Host memory of the copy."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these weights."""
        for _ in self.passing(weights):
            pass

    def passing(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights, each copied on its way."""
        for name, tensor in weights:
            held = self._tensors.get(name)
            if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
                held.copy_(tensor)
            else:
                self._tensors[name] = tensor.detach().to("cpu", copy=True)
            yield name, tensor

    def value(self, name: str) -> Tensor:
        """The present value of a weight.

        Raises:
            WeightSyncError: it never came.
        """
        if name not in self._tensors:
            raise WeightSyncError(f"changes of weight {name!r} came, which no sync of all weights has brought")
        return self._tensors[name]

    def everything(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, in the order in which they came."""
        yield from self._tensors.items()

    def with_partners(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These weights and those that an engine may fuse them with, in the order in which all came."""
        groups = {fused_group(name) for name in names}
        return ((name, tensor) for name, tensor in self._tensors.items() if fused_group(name) in groups)
