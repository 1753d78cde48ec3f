"""A model's parts: the backbone that makes hidden states, the head that makes logits or scores of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_core.errors import CapabilityError
from rlhf_core.model.linear_head import LogitScaling

_ATTRIBUTE = "_rlhf_heads"


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """How logits and scores are made, as the trial of the model found it (see `rlhf_core.model.trial`)."""

    own_logits: bool = False
    """By the model's own code after its backbone; else by the head alone and `logit_scaling`, which is faster."""
    own_scores: bool = False
    """By the model's own forward pass over padded rows; else by the scalar head on the last token's state."""

    @classmethod
    def of(cls, model: nn.Module) -> Heads:
        """Those of this model; the plain ones if it was not tried."""
        return vars(model).get(_ATTRIBUTE, cls())

    def settle(self, model: nn.Module) -> None:
        """Make them those of this model."""
        object.__setattr__(model, _ATTRIBUTE, self)


def backbone(model: Any) -> nn.Module:
    """The part of the model that ends in hidden states.

    Raises:
        CapabilityError: it has no such part.
    """
    body = model.base_model
    if body is model and hasattr(model, "get_decoder"):
        body = model.get_decoder()
    if body is model:
        # The name that the class gives its backbone is not there: the child that holds the embeddings is it.
        embeddings = model.get_input_embeddings()
        holders = [
            child for child in model.children() if child is not embeddings and embeddings in set(child.modules())
        ]
        if len(holders) != 1:
            raise CapabilityError(
                f"{kind_of(model)} has no backbone apart from its head, so its hidden states cannot be had; use "
                "another model"
            )
        body = holders[0]
    return body


def kind_of(model: Any) -> str:
    """The model's class and family, for messages."""
    family = getattr(getattr(model, "config", None), "model_type", "")
    return f"{type(model).__name__} ({family})" if family else type(model).__name__


def text_config(model: Any) -> Any:
    """The part of the model's config that is about text."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def language_head(model: Any) -> nn.Module:
    """The module that makes logits.

    Raises:
        CapabilityError: the model has none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise CapabilityError(
            f"{type(model).__name__} has no language-model head, so it has no log-probs; use the role policy"
        )
    return head


def scalar_head(model: Any) -> nn.Module:
    """The module that makes values or scores.

    Raises:
        CapabilityError: the model has none.
    """
    for name in ("score", "classifier"):
        if isinstance(head := getattr(model, name, None), nn.Module):
            return head
    raise CapabilityError(
        f"{type(model).__name__} has no scalar head; load value and reward models with "
        "AutoModelForSequenceClassification(num_labels=1)"
    )


def logit_scaling(model: Any) -> LogitScaling:
    """What the model does to its head's output, by its config, where that is known to be a factor or a soft cap.

    The trial of the model finds out whether that is all; if not, `OwnHead` is taken.
    """
    if getattr(model, "config", None) is None:
        return LogitScaling()
    text = text_config(model)
    kind = getattr(text, "model_type", "")
    factor = 1.0
    if kind.startswith("cohere"):
        factor = float(getattr(text, "logit_scale", None) or 1.0)
    elif kind.startswith("granite") or kind == "minicpm3":
        factor = 1.0 / float(getattr(text, "logits_scaling", None) or 1.0)
    elif kind == "hyperclovax":
        factor = float(getattr(text, "logits_scaling", None) or 1.0)
    elif kind == "falcon_h1":
        factor = float(getattr(text, "lm_head_multiplier", None) or 1.0)
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    cap = next((value for name in caps if (value := getattr(text, name, None))), None)
    return LogitScaling(factor=factor, soft_cap=cap)


class OwnHead:
    """Logits by the model's own code: its forward pass, with the hidden states given in the backbone's place.

    So whatever the model does after its backbone (factors, norms, prediction heads, cuts of the vocabulary) is
    done, without a list of what models do.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        """The model's logits of these states of its backbone's last layer."""
        model = self._model
        body = backbone(model)
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        switches = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
        with _replaced(model, body, _Given(body, hidden[None])), self._plain_call():
            # Not `model(...)`: hooks on the whole model have nothing to do with its head.
            return model.forward(input_ids=ids, use_cache=False, **switches).logits[0]

    @contextlib.contextmanager
    def _plain_call(self) -> Iterator[None]:
        """Where the head has a stand-in, as ZeRO-3 gathers it elsewhere, let the model call that one, too."""
        given: Any = self._model.get_output_embeddings()
        module = getattr(given, "module", None)
        if not isinstance(module, nn.Module) or isinstance(given, nn.Module):
            yield
            return
        owner = next(part for part in self._model.modules() if module in part._modules.values())
        with _replaced(owner, module, given):
            yield


class _Given:
    """Stands where the backbone is: gives the states it was made with, and the backbone's attributes."""

    def __init__(self, body: nn.Module, states: Tensor) -> None:
        self._body, self._states = body, states

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(last_hidden_state=self._states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class _Output(SimpleNamespace):
    """A backbone's output with hidden states alone; everything else is None."""

    def __getitem__(self, index: Any) -> Any:
        return ((self.last_hidden_state,))[index]

    def __getattr__(self, name: str) -> None:
        return None


@contextlib.contextmanager
def _replaced(owner: nn.Module, part: nn.Module, stand_in: Any) -> Iterator[None]:
    names = [name for name, child in owner._modules.items() if child is part]
    if not names:
        raise CapabilityError(f"{kind_of(owner)} does not hold its {type(part).__name__} where it could be found")
    modules: dict[str, Any] = owner._modules
    modules.update(dict.fromkeys(names, stand_in))
    try:
        yield
    finally:
        modules.update(dict.fromkeys(names, part))
