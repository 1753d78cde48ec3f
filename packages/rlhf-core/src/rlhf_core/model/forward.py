"""One forward pass of a Transformers model over a batch, giving just the outputs that are asked for.

The model is any Transformers-style module: `base_model` gives the backbone, `get_output_embeddings()` the
language-model head, `score` the scalar head of a sequence-classification model (critic and reward roles). After
`enable_packing(model)` the rows run unpadded and prompts that rows share run once; otherwise they run padded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from rlhf_core.data.batch import Batch
from rlhf_core.errors import CapabilityError
from rlhf_core.interfaces.loss import ModelOutputs
from rlhf_core.model.expert_routing import Routers, to_rows
from rlhf_core.model.hidden_states import HiddenStates, hidden_states
from rlhf_core.model.log_probs import (
    LogitScaling,
    chunked_candidate_log_probs,
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
    """
    routed = "aux_loss" in fields
    record = "routed_experts" in fields
    hidden = hidden_states(model, batch, routed=routed, record=record, replay=replay)
    mask = _predicted(batch)
    result: dict[str, Tensor] = {}
    if "log_probs" in fields or "entropy" in fields:
        log_probs, entropy = chunked_log_probs(
            hidden.before(mask),
            language_head(model),
            batch.token_ids[mask],
            temperature=batch.temperature,
            with_entropy="entropy" in fields,
            chunk=chunk,
            scaling=logit_scaling(model),
        )
        result |= {"log_probs": _scatter(log_probs, mask), "entropy": _scatter(entropy, mask)}
    if "candidate_log_probs" in fields:
        picked = chunked_candidate_log_probs(
            hidden.before(mask),
            language_head(model),
            batch["candidate_ids"][mask],
            temperature=batch.temperature,
            scaling=logit_scaling(model),
        )
        empty = picked.new_zeros(*mask.shape, picked.shape[-1])
        result["candidate_log_probs"] = empty.masked_scatter(mask[..., None], picked)
    if "values" in fields:
        result["values"] = _scatter(_scalar_head(model)(hidden.before(mask)).squeeze(-1), mask)
    if "scores" in fields:
        last = torch.zeros_like(mask)
        last[torch.arange(batch.rows, device=mask.device), batch.lengths - 1] = True
        result["scores"] = _full_precision(_scalar_head(model)(hidden.at(last)).squeeze(-1))
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
        return chunked_top_k(
            states, language_head(model), k, temperature=batch.temperature, scaling=logit_scaling(model)
        )


def _predicted(batch: Batch) -> Bool[Tensor, "rows length"]:
    """The counted tokens; the first of a row is predicted by nothing."""
    mask = batch.response_mask.clone()
    mask[:, 0] = False
    return mask


def logit_scaling(model: Any) -> LogitScaling:
    """What the model does to its head's output, by its config: Gemma's soft cap, Cohere's and Granite's factors."""
    config = getattr(model, "config", None)
    if config is None:
        return LogitScaling()
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    factor = 1.0
    kind = getattr(text, "model_type", "")
    if kind.startswith("cohere"):
        factor = float(getattr(text, "logit_scale", None) or 1.0)
    elif kind.startswith("granite"):
        factor = 1.0 / float(getattr(text, "logits_scaling", None) or 1.0)
    return LogitScaling(factor=factor, soft_cap=getattr(text, "final_logit_softcapping", None))


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


def _scalar_head(model: Any) -> nn.Module:
    for name in ("score", "classifier"):
        if isinstance(head := getattr(model, name, None), nn.Module):
            return head
    raise TypeError(
        f"{type(model).__name__} has no scalar head; load value and reward models with "
        "AutoModelForSequenceClassification(num_labels=1)"
    )


def _router_loss(model: Any, hidden: HiddenStates) -> Tensor:
    """The load-balancing loss of the model's own module (Switch Transformers, Fedus et al. 2021, eq. 4-6)."""
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if function is None or hidden.router_logits is None:
        raise CapabilityError(f"{type(model).__name__} is no mixture of experts with a load-balancing loss")
    counted = None if hidden.counted is None else hidden.counted.long()
    return function(hidden.router_logits, model.num_experts, model.num_experts_per_tok, counted)


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Put the per-token values back into [rows, length], zero elsewhere."""
    values = _full_precision(values)
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def _full_precision(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
