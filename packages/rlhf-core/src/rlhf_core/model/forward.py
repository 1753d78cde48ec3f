"""One forward pass of a Transformers model over a batch, giving just the outputs that are asked for.

The model is any Transformers-style module: `base_model` gives the backbone, `get_output_embeddings()` the
language-model head, `score` the scalar head of a sequence-classification model (critic and reward roles). After
`enable_packing(model)` the rows run unpadded and prompts that rows share run once; otherwise they run padded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_core.data.batch import Batch
from rlhf_core.errors import CapabilityError
from rlhf_core.interfaces.loss import ModelOutputs
from rlhf_core.model.expert_routing import Routers, has_routers, to_rows, to_tokens
from rlhf_core.model.log_probs import (
    LogitScaling,
    chunked_candidate_log_probs,
    chunked_log_probs,
    chunked_top_k,
)
from rlhf_core.model.packed_attention import has_dropout, is_packing
from rlhf_core.model.packing import PackedRows, pack


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HiddenStates:
    """States of the last layer, and where each token of the batch has its own."""

    states: Float[Tensor, "tokens hidden"]
    places: Int[Tensor, "rows length"]
    router_logits: Any = None
    """Per layer, of a mixture-of-experts model that was asked for them."""
    counted: Tensor | None = None
    """[rows, length] tokens the router logits belong to; None if to all."""

    def at(self, mask: Bool[Tensor, "rows length"]) -> Float[Tensor, "picked hidden"]:
        """States of the True positions, row by row."""
        return self.states.index_select(0, self.places[mask])

    def before(self, mask: Bool[Tensor, "rows length"]) -> Float[Tensor, "picked hidden"]:
        """States of the tokens that precede the True positions."""
        return self.states.index_select(0, self.places[:, :-1][mask[:, 1:]])


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


def hidden_states(
    model: nn.Module, batch: Batch, *, routed: bool = False, record: bool = False, replay: bool = False
) -> HiddenStates:
    """States of the last layer, packed if the model can; `record` and `replay` concern its routers."""
    packed = pack(batch, share_prompts=not has_dropout(model)) if is_packing(model) else None
    if record or has_routers(model) or (replay and "routed_experts" in batch):
        places = _padded_places(batch) if packed is None else packed.places
        count = batch.token_ids.numel() if packed is None else packed.token_ids.numel()
        wanted = None
        if replay and "routed_experts" in batch:
            wanted = to_tokens(batch["routed_experts"], places, batch.attention_mask, count)
        Routers.of(model).begin(record=record, wanted=wanted)
    if packed is not None:
        return packed_states(model, packed, routed=routed)
    return padded_states(model, batch, routed=routed)


def _padded_places(batch: Batch) -> Int[Tensor, "rows length"]:
    return torch.arange(batch.token_ids.numel(), device=batch.token_ids.device).view(batch.token_ids.shape)


def _predicted(batch: Batch) -> Bool[Tensor, "rows length"]:
    """The counted tokens; the first of a row is predicted by nothing."""
    mask = batch.response_mask.clone()
    mask[:, 0] = False
    return mask


def padded_states(model: Any, batch: Batch, *, routed: bool = False) -> HiddenStates:
    """Run the backbone on the padded rows."""
    # The backbone, not the model: its head would make logits of every token. ZeRO-3's hooks sit on every
    # submodule, so this gathers what it needs there too.
    outputs = model.base_model(
        input_ids=batch.token_ids,
        attention_mask=batch.attention_mask.long(),
        use_cache=False,
        **({"output_router_logits": True} if routed else {}),
    )
    states = outputs.last_hidden_state
    return HiddenStates(
        states=states.flatten(0, 1),
        places=_padded_places(batch),
        router_logits=outputs.router_logits if routed else None,
        counted=batch.attention_mask,
    )


def packed_states(model: Any, packed: PackedRows, *, routed: bool = False) -> HiddenStates:
    """Run the backbone on packed rows."""
    outputs = model.base_model(
        input_ids=packed.token_ids,
        # A mask of four dimensions is passed on as it is: no [tokens, tokens] mask is built.
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packed.token_ids.device),
        position_ids=packed.position_ids,
        use_cache=False,
        layout=packed.layout,
        **({"output_router_logits": True} if routed else {}),
    )
    return HiddenStates(
        states=outputs.last_hidden_state[0],
        places=packed.places,
        router_logits=outputs.router_logits if routed else None,
    )


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
