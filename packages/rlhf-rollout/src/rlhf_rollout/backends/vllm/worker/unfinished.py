"""Layers of which a part has come, in a layer-wise reload; imported by vLLM, never by this package.

Layer-wise reload points to all that has come for a layer until the layer is complete, and then loads it. A sync
brings a layer in many buckets, whose memory is used again. Copies of all that has come would be a whole layer's
weights as the checkpoint has them, with all experts, on every worker. So linear layers and experts get
the memory of their own part of the weights (with tensor parallelism a slice) with the first bucket, and everything
is loaded into it as it comes. This memory is what vLLM takes anyway when the layer is complete. What other layers
still point to is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from rlhf_rollout.backends.vllm.worker.direct_copies import is_direct_copy


class UnfinishedLayers:
    """The layers of a model that a reload has begun; it looks through the model once."""

    def __init__(self, model: nn.Module) -> None:
        self._with_memory: set[nn.Module] = set()
        self._waiting = [
            (layer, info) for layer in model.modules() if (info := get_layerwise_info(layer)).can_load()
        ]

    def settle(self, memory: set[int]) -> None:
        """Let no layer point to this memory, given by the addresses of its storages."""
        copies: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._waiting = [(layer, info) for layer, info in self._waiting if info.can_load()]
        for layer, info in self._waiting:
            if layer in self._with_memory:
                info.loaded_weights.clear()  # vLLM's count of what comes has loaded it already
            elif info.loaded_weights and _loads_at_once(layer, info):
                self._with_memory.add(layer)
                _load_now(layer, info)
            else:
                _copy(info, memory, copies)


def _loads_at_once(layer: nn.Module, info: Any) -> bool:
    """Whether what comes for the layer can be put where it belongs before the layer is complete."""
    method = getattr(layer, "quant_method", None)
    plain = isinstance(method, UnquantizedFusedMoEMethod) or (
        isinstance(layer, LinearBase) and isinstance(method, UnquantizedLinearMethod)
    )
    # A reload counts direct copies while the layer has no memory, and restores only buffers that it points to.
    return plain and not any(
        is_direct_copy(bound) or name in layer._non_persistent_buffers_set for name, bound in info.loaded_weights
    )


@torch.no_grad()
def _load_now(layer: nn.Module, info: Any) -> None:
    """Give the layer memory, and load all that it points to."""
    materialize_layer(layer, info)
    for name, bound in info.loaded_weights:
        parameter: Any = getattr(layer, name)
        bound.arguments["param"] = parameter
        _get_original_loader(parameter)(*bound.args, **bound.kwargs)
    info.loaded_weights.clear()


def _copy(info: Any, memory: set[int], copies: dict[tuple[int, tuple[int, ...]], Tensor]) -> None:
    for _, bound in info.loaded_weights:
        for key, value in bound.arguments.items():
            if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() in memory:
                place = (value.data_ptr(), tuple(value.shape))
                if place not in copies:
                    copies[place] = value.clone()
                bound.arguments[key] = copies[place]
