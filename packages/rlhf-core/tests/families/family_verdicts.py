"""What becomes of a model family here: its numbers against the model's own, padded and packed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from rlhf_core import Batch, ConfigError, entropy_from_logits, log_probs_from_logits, model_outputs
from rlhf_core.model.own_numbers import own_forward
from rlhf_core.model.trial import Trial, try_model
from torch import Tensor

Outcome = Literal["equal", "declined", "refused", "wrong"]

TOLERANCE = 1e-3
"""Nats, and share of the largest gradient. Float32 gives 1e-5; what is wrong is off by 1e-2 or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One way of running one family."""

    outcome: Outcome
    reason: str = ""
    """Why it was declined or refused, or what is wrong."""
    own_head: bool = False
    differences: dict[str, float] = field(default_factory=dict)
    """Largest difference of log-probs and entropies (or values, or scores); of gradients relative to the largest
    one, none where the model's own backward pass fails."""


def rows(vocabulary: int = 64) -> Batch:
    """Three rows share a prompt of 9 tokens, one has its own of 5; answers of 1 to 8 tokens."""
    random = torch.Generator().manual_seed(1)
    prompts, lengths, width = [9, 9, 9, 5], [17, 12, 10, 13], 17
    ids = torch.randint(4, vocabulary // 2, (4, width), generator=random)
    ids[:3, :9] = ids[0, :9].clone()
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    counted = mask & (torch.arange(width) >= torch.tensor(prompts)[:, None])
    return Batch(token_ids=ids.masked_fill(~mask, 0), attention_mask=mask, response_mask=counted)


def judge(model: Any, role: str, *, packing: bool) -> Verdict:
    """Try a copy of the model, run it on rows that the trial does not have, and compare."""
    ours = copy.deepcopy(model)
    try:
        trial = try_model(ours, role, packing=packing)  # type: ignore[arg-type]
    except ConfigError as error:
        return Verdict(outcome="refused", reason=str(error))
    if packing and not trial.packing:
        return Verdict(outcome="declined", reason=trial.declined, own_head=trial.own_head)
    return _compared(ours, _own(model), role, trial)


def _own(model: Any) -> Any:
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    return own


def _compared(ours: Any, own: Any, role: str, trial: Trial) -> Verdict:
    batch = rows()
    fields = {"critic": ("values",), "reward": ("scores",)}.get(role, ("log_probs", "entropy"))
    outputs = model_outputs(ours, batch, fields)
    found = [getattr(outputs, name) for name in fields]
    expected = {"critic": _values, "reward": _scores}.get(role, _log_probs)(own, batch)
    differences = {
        name: float((left - right).detach().abs().max())
        for name, left, right in zip(fields, found, expected, strict=True)
    }
    try:
        _backward(expected)
    except (RuntimeError, AssertionError):
        pass  # the model's own backward pass fails; there is nothing to compare
    else:
        _backward(found)
        differences["gradient"] = _gradient_gap(ours, own)
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= TOLERANCE:
        reason = f"{worst} off by {differences[worst]:.2g}"
        return Verdict(outcome="wrong", reason=reason, own_head=trial.own_head, differences=differences)
    return Verdict(outcome="equal", own_head=trial.own_head, differences=differences)


def _log_probs(own: Any, batch: Batch) -> list[Tensor]:
    """Log-probs and entropies from the full logits of each row alone."""
    found = [torch.zeros(batch.token_ids.shape) for _ in range(2)]
    for row, length in enumerate(batch.lengths.tolist()):
        logits = own_forward(own, batch.token_ids[row : row + 1, :length]).logits[0]
        ids = batch.token_ids[row, 1:length]
        for total, values in zip(
            found, (log_probs_from_logits(logits[:-1], ids), entropy_from_logits(logits[:-1])), strict=True
        ):
            total[row, 1:length] = values
    return [total * batch.response_mask for total in found]


def _scores(own: Any, batch: Batch) -> list[Tensor]:
    lengths = enumerate(batch.lengths.tolist())
    return [torch.cat([own_forward(own, batch.token_ids[row : row + 1, :n]).logits[0] for row, n in lengths])]


def _values(own: Any, batch: Batch) -> list[Tensor]:
    """The score of every row cut before each counted token."""
    found = torch.zeros(batch.token_ids.shape)
    for row, place in batch.response_mask.nonzero().tolist():
        found[row, place] = own_forward(own, batch.token_ids[row : row + 1, :place]).logits[0, 0]
    return [found]


def _backward(outputs: Sequence[Tensor]) -> None:
    total = torch.zeros(())
    for index, value in enumerate(outputs):
        weights = torch.linspace(0.5, 1.5, value.numel()).view_as(value)
        total = total + (value * weights).sum() / (1 + 2 * index)
    total.backward()


def _gradient_gap(ours: Any, own: Any) -> float:
    """Largest difference of a parameter's gradient, relative to the largest entry of all gradients."""
    gaps, largest = [0.0], 1e-6
    for mine, its in zip(ours.parameters(), own.parameters(), strict=True):
        left = torch.zeros(()) if mine.grad is None else mine.grad
        right = torch.zeros(()) if its.grad is None else its.grad
        gaps.append(float((left - right).abs().max()))
        largest = max(largest, float(right.abs().max()))
    return max(gaps) / largest
