"""Log-probs of given tokens, without ever holding the [tokens, vocab] logits of a whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def log_probs_from_logits(
    logits: Float[Tensor, "*tokens vocab"], targets: Int[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens"]:
    """log softmax(logits)[target], in float32 or better: logit of the target minus logsumexp."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return picked - logits.logsumexp(dim=-1)


def entropy_from_logits(logits: Float[Tensor, "*tokens vocab"]) -> Float[Tensor, "*tokens"]:
    """Entropy of softmax(logits) in nats: logsumexp(logits) - sum p * logits."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return logits.logsumexp(dim=-1) - (logits.softmax(dim=-1) * logits).sum(dim=-1)


def chunked_log_probs(
    hidden: Float[Tensor, "tokens hidden"],
    head: Callable[[Tensor], Tensor],
    targets: Int[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int = 1024,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-probs (and entropies, else zeros) of `targets` under softmax(head(hidden) / temperature).

    Logits exist for `chunk` tokens at a time; the backward pass computes them again. `head` is called as a
    module, so ZeRO-3's gathering hooks fire.
    """

    def scores(part: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(part).float() / temperature if part.dtype != torch.float64 else head(part) / temperature
        log_probs = log_probs_from_logits(logits, target)
        return log_probs, entropy_from_logits(logits) if with_entropy else torch.zeros_like(log_probs)

    parts = []
    for part, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        if torch.is_grad_enabled() and hidden.requires_grad:
            parts.append(checkpoint(scores, part, target, use_reentrant=False))
        else:
            parts.append(scores(part, target))
    if not parts:
        empty = hidden.sum(dim=-1)
        return empty, empty
    log_probs, entropy = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)
