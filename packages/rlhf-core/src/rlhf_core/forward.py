"""One forward pass of a Transformers model over a batch, giving just the outputs that are asked for.

The model is any Transformers-style module: `base_model` gives the backbone, `get_output_embeddings()` the
language-model head, `score` the scalar head of a sequence-classification model (critic and reward roles).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.batch import Batch
from rlhf_core.log_probs import chunked_log_probs
from rlhf_core.loss import ModelOutputs


def model_outputs(model: nn.Module, batch: Batch, fields: Sequence[str], *, chunk: int = 1024) -> ModelOutputs:
    """Run `model` on the rows of `batch` (on the model's device) and return `fields` of ModelOutputs.

    Gradients flow unless the caller disables them. The head runs only where there is a response token.
    """
    hidden = _hidden_states(model, batch)
    result: dict[str, Tensor] = {}
    if "log_probs" in fields or "entropy" in fields:
        result |= _token_outputs(model, batch, hidden, with_entropy="entropy" in fields, chunk=chunk)
    if "values" in fields:
        states, mask = _states_before(hidden, batch)
        result["values"] = _scatter(_scalar_head(model)(states).squeeze(-1), mask)
    if "scores" in fields:
        last = hidden[torch.arange(batch.rows, device=hidden.device), batch.lengths - 1]
        result["scores"] = _full_precision(_scalar_head(model)(last).squeeze(-1))
    return ModelOutputs(**{name: tensor for name, tensor in result.items() if name in fields})


def _hidden_states(model: Any, batch: Batch) -> Tensor:
    """[rows, length, hidden] of the last layer."""
    # Through the model itself where it is wrapped (ZeRO, DDP): calling the backbone directly is fine for plain
    # modules and for ZeRO-3, whose hooks sit on every submodule.
    outputs = model.base_model(
        input_ids=batch.token_ids, attention_mask=batch.attention_mask.long(), use_cache=False
    )
    return outputs.last_hidden_state


def _states_before(hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states that precede each response token, [tokens, hidden], and the mask to scatter back with."""
    mask = batch.response_mask.clone()
    mask[:, 0] = False
    return hidden[:, :-1][mask[:, 1:]], mask


def _token_outputs(
    model: Any, batch: Batch, hidden: Tensor, *, with_entropy: bool, chunk: int
) -> dict[str, Tensor]:
    states, mask = _states_before(hidden, batch)
    log_probs, entropy = chunked_log_probs(
        states,
        model.get_output_embeddings(),
        batch.token_ids[mask],
        temperature=batch.temperature,
        with_entropy=with_entropy,
        chunk=chunk,
    )
    return {"log_probs": _scatter(log_probs, mask), "entropy": _scatter(entropy, mask)}


def _scalar_head(model: Any) -> nn.Module:
    for name in ("score", "classifier"):
        if isinstance(head := getattr(model, name, None), nn.Module):
            return head
    raise TypeError(
        f"{type(model).__name__} has no scalar head; load value and reward models with "
        "AutoModelForSequenceClassification(num_labels=1)"
    )


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Put the per-token values back into [rows, length], zero elsewhere."""
    values = _full_precision(values)
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def _full_precision(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
