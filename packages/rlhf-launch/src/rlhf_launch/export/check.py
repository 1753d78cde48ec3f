"""Whether a written model says what its source says: logits on a short text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rlhf_core import CheckpointError
from torch import Tensor

TEXT = "The sum of 17 and 25 is 42. Why? Because seven and five make twelve."
_MOST_TOKENS = 32
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of the gap: roundings of weights and activations, summed up over some dozen layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitGap:
    """How far two models' logits are apart on the same tokens."""

    gap: float
    """Root mean square of the differences, relative to that of the source's logits around their mean."""
    tolerance: float
    outputs: int
    """Numbers that were compared."""

    def __str__(self) -> str:
        return (
            f"{self.outputs:,} logits on a short text: {self.gap:.2g} from the source's, relative (at most "
            f"{self.tolerance:g})"
        )


def probe_tokens(tokenizer: Any, vocab_size: int) -> list[int]:
    """Tokens of a short text; the first of the vocabulary where there is no tokenizer."""
    found: Sequence[int] = () if tokenizer is None else tokenizer(TEXT)["input_ids"]
    usable = [token for token in found if token < vocab_size][:_MOST_TOKENS]
    return usable or list(range(min(_MOST_TOKENS, vocab_size)))


def logits_of(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Float32 logits (or scores, of a reward model) for one row, `[tokens or 1, outputs]`, dropout off."""
    was_training = model.training
    model.eval()
    rows = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    with torch.no_grad():
        logits = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
    model.train(was_training)
    return logits.float().cpu().reshape(-1, logits.shape[-1])


def tolerance(*dtypes: torch.dtype) -> float:
    """The gap that models in these dtypes may have: that of the coarsest."""
    return max(_TOLERANCES.get(dtype, _TOLERANCES[torch.float32]) for dtype in dtypes)


def compare(source: Tensor, written: Tensor, tolerance: float) -> LogitGap:
    """Compare what two models say of the same tokens.

    Args:
        source: see `logits_of`.
        written: the same of the model that was written.
        tolerance: the largest gap that is not an error.

    Raises:
        CheckpointError: they say something else, or the written one overflows.
    """
    if bool(torch.isfinite(source).all()) and not bool(torch.isfinite(written).all()):
        raise CheckpointError(
            "the written model's logits are not finite, those of its source are: its numbers are too large for the "
            "dtype; export it as bfloat16 or float32. Nothing was kept"
        )
    if source.shape != written.shape:
        raise CheckpointError(
            f"the written model has logits of the shape {list(written.shape)}, its source {list(source.shape)}; "
            "nothing was kept"
        )
    # A reward model has one number: around its mean nothing would be left of it.
    around = source - source.mean() if source.numel() > 1 else source
    scale = around.square().mean().sqrt().clamp_min(1e-6)
    gap = float((source - written).square().mean().sqrt() / scale)
    found = LogitGap(gap=gap, tolerance=tolerance, outputs=source.numel())
    if not gap <= tolerance:
        raise CheckpointError(
            f"the written model does not say what its source says: {found}. Nothing was kept; another dtype, or "
            "files that changed meanwhile, may be the reason"
        )
    return found
