"""Weights that a model of vLLM's copies straight into its parameters, for layer-wise reload.

Layer-wise reload keeps what goes through the weight loaders of parameters on the meta device, and loads it once a
layer is complete. Some models copy certain weights into their parameters themselves (gpt-oss: attention sinks and
experts); on the meta device such a copy vanishes without a word.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import CopyCounter


@contextlib.contextmanager
def direct_copies_kept(model: nn.Module) -> Iterator[None]:
    """Within a reload, keep copies into parameters on the meta device for when their layer is loaded."""
    places = {
        parameter.untyped_storage()._cdata: (layer, name)
        for layer in model.modules()
        for name, parameter in layer._parameters.items()
        if parameter is not None and parameter.is_meta
    }
    with _DirectCopies(places) as copies:
        try:
            yield
        finally:
            copies.restore_loaders()


class _DirectCopies(TorchFunctionMode):
    def __init__(self, places: dict[int, tuple[nn.Module, str]]) -> None:
        super().__init__()
        self._places = places
        self._loaders: dict[int, tuple[Any, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and args[0].is_meta and not _in_a_weight_loader():
            place = self._places.get(args[0].untyped_storage()._cdata)
            if place is not None:
                self._keep(*place, args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _keep(self, layer: nn.Module, name: str, target: Tensor, value: Tensor) -> None:
        info = get_layerwise_info(layer)
        if not info.can_load():
            return
        parameter: Any = getattr(layer, name)
        if id(parameter) not in self._loaders:
            self._loaders[id(parameter)] = parameter, getattr(parameter, "weight_loader", None)
            parameter.weight_loader = _put
        part = target.size(), target.stride(), target.storage_offset()
        # A copy: the memory of a bucket is used again by the next one.
        bound = _PUT.bind(parameter, value.detach().clone(), part)
        info.loaded_weights.append((name, bound))
        info.load_numel += target.numel()
        if info.load_numel >= (info.load_numel_total or 0):
            _layerwise_process(layer, info)

    def restore_loaders(self) -> None:
        """Give parameters the weight loaders that they had; vLLM keeps them for the next reload."""
        for parameter, loader in self._loaders.values():
            if loader is None:
                del parameter.weight_loader
            else:
                parameter.weight_loader = loader


def is_direct_copy(bound: inspect.BoundArguments) -> bool:
    """Whether a load that a layer waits for was kept by `direct_copies_kept`."""
    return bound.signature is _PUT


def _in_a_weight_loader() -> bool:
    """Layer-wise reload counts there, and calls the same loader again when the layer is complete."""
    return any(isinstance(mode, CopyCounter) for mode in _get_current_dispatch_mode_stack())


def _put(param: Tensor, value: Tensor, part: tuple[torch.Size, tuple[int, ...], int]) -> None:
    """A weight loader that copies into a part of a parameter: its size, strides and offset."""
    param.data.as_strided(*part).copy_(value)


_PUT = inspect.signature(_put)
