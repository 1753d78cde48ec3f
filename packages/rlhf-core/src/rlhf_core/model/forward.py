"""One forward pass of a Transformers model over a batch, giving just the outputs that are asked for.

The model is any Transformers-style module: a backbone with a language-model head, or with the scalar head of a
sequence-classification model (critic and reward roles). `try_model` finds out how its outputs are had, and whether
rows can run unpadded and prompts that rows share run once; a model that was not tried runs padded rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from rlhf_core.data.batch import Batch
from rlhf_core.errors import CapabilityError
from rlhf_core.interfaces.loss import ModelOutputs
from rlhf_core.model.expert_routing import Routers, to_rows
from rlhf_core.model.heads import Heads, OwnHead, kind_of, language_head, logit_scaling, scalar_head
from rlhf_core.model.hidden_states import HiddenStates, hidden_states
from rlhf_core.model.linear_head import LogitScaling, full_precision
from rlhf_core.model.log_probs import (
    CANDIDATE_CHUNK,
    chunked_candidate_log_probs,
    chunked_log_collision,
    chunked_log_probs,
    chunked_top_k,
)


def model_outputs(
    model: nn.Module, batch: Batch, fields: Sequence[str], *, chunk: int | None = None, replay: bool = False
) -> ModelOutputs:
    """Run `model` on the rows of `batch` (on the model's device) and return `fields` of ModelOutputs.

    Gradients flow unless the caller disables them. The head runs only where there is a response token, on
    `chunk` of them at a time (None chooses by the size of the vocabulary). With `replay` the experts are those of
    the batch's column `routed_experts`, if it has one (see `rlhf_core.model.expert_routing`).

    Raises:
        CapabilityError: the model cannot give one of the fields.
    """
    routed = "aux_loss" in fields
    record = "routed_experts" in fields
    if "scores" in fields and Heads.of(model).own_scores:
        return _own_scores(model, batch, fields)
    hidden = hidden_states(model, batch, routed=routed, record=record, replay=replay)
    mask = _predicted(batch)
    result: dict[str, Tensor] = {}
    if "log_probs" in fields or "entropy" in fields:
        head, scaling = _logits_of(model)
        log_probs, entropy = chunked_log_probs(
            hidden.before(mask),
            head,
            batch.token_ids[mask],
            temperature=batch.temperature,
            with_entropy="entropy" in fields,
            chunk=chunk,
            scaling=scaling,
        )
        result |= {"log_probs": _scatter(log_probs, mask), "entropy": _scatter(entropy, mask)}
    if "log_collision" in fields:
        collision = chunked_log_collision(
            hidden.before(mask), language_head(model), temperature=batch.temperature, scaling=logit_scaling(model)
        )
        result["log_collision"] = _scatter(collision, mask)
    if "candidate_log_probs" in fields:
        head, scaling = _logits_of(model)
        picked = chunked_candidate_log_probs(
            hidden.before(mask),
            head,
            batch["candidate_ids"][mask],
            temperature=batch.temperature,
            scaling=scaling,
            chunk=chunk or CANDIDATE_CHUNK,
        )
        empty = picked.new_zeros(*mask.shape, picked.shape[-1])
        result["candidate_log_probs"] = empty.masked_scatter(mask[..., None], picked)
    if "values" in fields:
        result["values"] = _scatter(_values_head(model)(hidden.before(mask)).squeeze(-1), mask)
    if "scores" in fields:
        last = torch.zeros_like(mask)
        last[torch.arange(batch.rows, device=mask.device), batch.lengths - 1] = True
        result["scores"] = full_precision(scalar_head(model)(hidden.at(last)).squeeze(-1))
    if record:
        choices = Routers.of(model).recorded()
        result["routed_experts"] = to_rows(choices, hidden.places, batch.attention_mask)
    if routed:
        result["aux_loss"] = _router_loss(model, hidden)
    return ModelOutputs(**{name: tensor for name, tensor in result.items() if name in fields})


def top_k_log_probs(model: nn.Module, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
    """Log-probs and ids, [counted tokens, k] each, of the k most likely tokens in the places of response tokens."""
    with torch.no_grad():
        states = hidden_states(model, batch).before(_predicted(batch))
        head, scaling = _logits_of(model)
        return chunked_top_k(states, head, k, temperature=batch.temperature, scaling=scaling)


def _logits_of(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], LogitScaling]:
    """What makes logits of hidden states, and what is done to these."""
    if Heads.of(model).own_logits:
        return OwnHead(model), LogitScaling()
    return language_head(model), logit_scaling(model)


def _values_head(model: nn.Module) -> nn.Module:
    if Heads.of(model).own_scores:
        raise CapabilityError(
            f"{kind_of(model)} scores whole rows by a head of its own and has no value for each token; use a "
            "causal model with a plain scalar head"
        )
    return scalar_head(model)


def _own_scores(model: Any, batch: Batch, fields: Sequence[str]) -> ModelOutputs:
    if tuple(fields) != ("scores",):
        raise CapabilityError(f"{kind_of(model)} gives scores alone, was asked for {', '.join(fields)}")
    # Models that look for the last token of a row by their padding token must find it there.
    padding = getattr(model.config, "pad_token_id", None)
    ids = batch.token_ids if padding is None else batch.token_ids.masked_fill(~batch.attention_mask, padding)
    logits = model(input_ids=ids, attention_mask=batch.attention_mask.long()).logits
    return ModelOutputs(scores=full_precision(logits.squeeze(-1)))


def _predicted(batch: Batch) -> Bool[Tensor, "rows length"]:
    """The counted tokens; the first of a row is predicted by nothing."""
    mask = batch.response_mask.clone()
    mask[:, 0] = False
    return mask


def _router_loss(model: Any, hidden: HiddenStates) -> Tensor:
    """The load-balancing loss of the model's own module (Switch Transformers, Fedus et al. 2021, eq. 4-6)."""
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if function is None or hidden.router_logits is None:
        raise CapabilityError(f"{type(model).__name__} is no mixture of experts with a load-balancing loss")
    counted = None if hidden.counted is None else hidden.counted.long()
    return function(hidden.router_logits, model.num_experts, model.num_experts_per_tok, counted)


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Put the per-token values back into [rows, length], zero elsewhere."""
    values = full_precision(values)
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
