"""A module's weights as its checkpoint has them: the names and shapes in which they travel.

Transformers keeps some weights in another layout than their checkpoint, for instance all experts of a layer in one
tensor. Each tensor of the checkpoint is then a part of a parameter, which can be read and written in its place.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.errors import WeightSyncError


def checkpoint_views(module: nn.Module) -> dict[str, Tensor]:
    """The parameters under their checkpoint names; those of another layout as views of the parts.

    Tied parameters appear once, under their first name. Writing into a view changes the module.

    Raises:
        WeightSyncError: a tensor of the checkpoint is made of several parameters, or computed from one.
    """
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    model = _transformers_model(module)
    if model is None:
        return parameters
    outlines = {name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()}
    plain = _reverted(model, outlines)
    views: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if plain.get(name) is outlines[name]:
            parts = {name: parameter}
        else:
            parts = {target: _part(name, parameter, places) for target, places in _places(model, name, parameter)}
        if twice := views.keys() & parts.keys():
            raise WeightSyncError(
                f"weight {min(twice)!r} of {type(module).__name__}'s checkpoint is made of several parameters, "
                f"{name!r} among them; such layouts cannot be synchronised"
            )
        views |= parts
    return views


def _transformers_model(module: nn.Module) -> Any:
    """The module, if it is a model of Transformers; that library is not imported for it."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    return module if isinstance(module, PreTrainedModel) else None


def _reverted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def _places(model: Any, name: str, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """For each checkpoint tensor that is made of a parameter, the place in it of every value."""
    numbers = torch.arange(parameter.numel()).view(parameter.shape)
    return list(_reverted(model, {name: numbers}).items())


def _part(name: str, parameter: Tensor, places: Tensor) -> Tensor:
    """The part of a parameter whose values are at `places`, as a view.

    >>> _part("w", torch.arange(6.0).view(2, 3), torch.tensor([[2, 5]])).tolist()
    [[2.0, 5.0]]
    """
    first = places[(0,) * places.dim()]
    strides = [
        int(places.select(dim, 1)[(0,) * (places.dim() - 1)] - first) if size > 1 else 1
        for dim, size in enumerate(places.shape)
    ]
    whole = torch.arange(parameter.numel())
    regular = min(strides, default=1) >= 0 and parameter.is_contiguous() and not places.is_floating_point()
    if not regular or not torch.equal(whole.as_strided(places.shape, strides, int(first)), places):
        raise WeightSyncError(
            f"weight {name!r} is written to the checkpoint in a form that is not a part of it; such layouts cannot "
            "be synchronised"
        )
    return parameter.detach().as_strided(places.shape, strides, parameter.storage_offset() + int(first))
