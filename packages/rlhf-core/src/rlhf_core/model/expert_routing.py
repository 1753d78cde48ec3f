"""Replaying the experts that a mixture-of-experts model chose before (Zheng et al. 2025, arXiv:2507.18071).

Between the forward pass that gave the old log-probs and one in training a router may change its mind about a token.
The importance ratio then compares different networks. With the choice replayed a token runs through the experts it
ran through before, and only their weights are those of the router as it is now, gradients included.

The choices travel as the output, and then the batch's column, `routed_experts`: per token the experts of all
layers, [rows, length, layers * k]. So they stay with their rows however these are cut, packed or dealt to ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from rlhf_core.errors import CapabilityError

NO_CHOICE = -1
"""Stands in `routed_experts` where no choice was recorded; the router then makes its own."""

_ATTRIBUTE = "_rlhf_routers"


class Routers:
    """The routers of one model, in the order of its layers, with what they chose or are to choose.

    Hooks stay on the model. Gradient checkpointing runs layers again in the backward pass, and these passes must
    find the same choices: they are kept until the next forward pass says otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        self._count = 0
        self._wanted: Tensor | None = None
        self._used: dict[int, Tensor] | None = None
        self._normalised: dict[int, bool] = {}
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(partial(self._after_router, self._count))
                self._count += 1
            elif len(signature(route := getattr(module, "route_tokens_to_experts", len)).parameters) == 2:
                setattr(module, "route_tokens_to_experts", partial(self._route, self._count, route))  # noqa: B010
                self._count += 1
        if not self._count:
            raise CapabilityError(f"{type(model).__name__} has no router whose choice of experts could be replayed")

    @classmethod
    def of(cls, model: nn.Module) -> Routers:
        """Those of the model, found at the first call.

        Raises:
            CapabilityError: it has none of a known kind.
        """
        if _ATTRIBUTE not in vars(model):
            object.__setattr__(model, _ATTRIBUTE, cls(model))
        return vars(model)[_ATTRIBUTE]

    def begin(self, *, record: bool, wanted: Int[Tensor, "tokens choices"] | None = None) -> None:
        """Say what the next forward pass does, over tokens in the order the model sees them."""
        self._used = {} if record else None
        self._wanted = None
        if wanted is not None:
            if wanted.shape[1] % self._count:
                raise CapabilityError(
                    f"routed_experts has {wanted.shape[1]} choices per token, which do not divide among the "
                    f"model's {self._count} routers; they were recorded with another model"
                )
            self._wanted = wanted.long().unflatten(1, (self._count, -1))

    def recorded(self) -> Int[Tensor, "tokens choices"]:
        """What the routers chose, or were made to choose, in the forward pass just done."""
        used, self._used = self._used, None
        if not used or len(used) != self._count:
            raise CapabilityError(f"only {len(used or ())} of the model's {self._count} routers ran")
        return torch.cat([used[index] for index in range(self._count)], dim=1).short()

    def _after_router(self, index: int, module: nn.Module, args: Any, outputs: Any) -> Any:
        if not (isinstance(outputs, tuple) and len(outputs) == 3):
            raise CapabilityError(f"the experts that {type(module).__name__} chooses cannot be replayed")
        logits, weights, experts = outputs
        return (logits, *self._choose(index, logits, weights, experts))

    def _route(self, index: int, route: Callable[..., Any], hidden: Tensor, logits: Tensor) -> Any:
        experts, weights = route(hidden, logits)
        weights, experts = self._choose(index, logits, weights, experts)
        return experts, weights

    def _choose(self, index: int, logits: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        if self._wanted is not None:
            if index not in self._normalised:
                self._normalised[index] = _is_normalised(logits, weights, experts)
            wanted = self._wanted[:, index]
            if wanted.shape != experts.shape:
                raise CapabilityError(
                    f"routed_experts has {wanted.shape[1]} experts for each of {wanted.shape[0]} tokens, the "
                    f"router chooses {experts.shape[1]} for each of {experts.shape[0]}"
                )
            experts = torch.where(wanted == NO_CHOICE, experts, wanted)
            weights = _weights(logits, experts, normalised=self._normalised[index]).to(weights.dtype)
        if self._used is not None:
            self._used.setdefault(index, experts.detach())
        return weights, experts


def has_routers(model: nn.Module) -> bool:
    """Whether `Routers.of` was called for this model, so that every forward pass must say what routers do."""
    return _ATTRIBUTE in vars(model)


def _weights(logits: Tensor, experts: Tensor, *, normalised: bool) -> Tensor:
    """Probabilities of the experts, [tokens, k], made to sum to 1 if `normalised`."""
    picked = torch.softmax(logits.float(), dim=-1).gather(-1, experts)
    return picked / picked.sum(dim=-1, keepdim=True) if normalised else picked


@torch.no_grad()
def _is_normalised(logits: Tensor, weights: Tensor, experts: Tensor) -> bool:
    """Which of the two ways this router weighs its experts, found by doing it both ways."""
    for normalised in (True, False):
        again = _weights(logits, experts, normalised=normalised).to(weights.dtype)
        if torch.allclose(again.float(), weights.float(), rtol=1e-2, atol=1e-4):
            return normalised
    raise CapabilityError(
        "the model's router weighs its experts by something else than a softmax; their choice cannot be replayed"
    )


def to_tokens(
    column: Int[Tensor, "rows length choices"],
    places: Int[Tensor, "rows length"],
    mask: Bool[Tensor, "rows length"],
    count: int,
) -> Int[Tensor, "tokens choices"]:
    """The column in the order of the `count` tokens that the model sees; NO_CHOICE where it says nothing."""
    tokens = column.new_full((count, column.shape[-1]), NO_CHOICE)
    tokens[places[mask]] = column[mask]
    return tokens


def to_rows(
    choices: Int[Tensor, "tokens choices"], places: Int[Tensor, "rows length"], mask: Bool[Tensor, "rows length"]
) -> Int[Tensor, "rows length choices"]:
    """Inverse of `to_tokens`; NO_CHOICE in the padding."""
    return choices[places].masked_fill(~mask[..., None], NO_CHOICE)
