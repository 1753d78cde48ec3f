"""Log-probs of given tokens, without ever holding the [tokens, vocab] logits of a whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_core.model.linear_head import ChunkSettings, LinearLogProbs, LogitScaling, as_linear_head, full_precision

_CHUNK_ELEMENTS = {"cuda": 5 << 26}
"""Logits of a chunk, by the kind of device. On a GPU every chunk costs a pass over the head's weight and two
over its float32 gradient, so it takes 1.25 GiB of logits: 2,208 tokens of a vocabulary of 152,000,
1,310 of 256,000."""
_ON_HOSTS = 1 << 24
"""What stays near the caches of a CPU: 64 MiB in float32."""
_MOST_TOKENS = 4096
"""Of a chunk on a GPU: with more the products take no less time."""
_BYTES_PER_LOGIT = 10
"""At the peak of a chunk: the head's output in 16 bits, the same in float32, and its log-softmax."""
_CHUNKS: list[int] = []
"""What `chunks_of` has asked for."""
CANDIDATE_CHUNK = 256
"""Positions whose logits exist at a time where k tokens of each are looked up."""


def head_chunk(vocabulary: int, device: str) -> int:
    """Tokens whose logits exist at a time on a kind of device, where nothing else is asked for.

    >>> head_chunk(151_936, "cpu"), head_chunk(151_936, "cuda"), head_chunk(32_000, "cuda")
    (110, 2208, 4096)
    """
    if device not in _CHUNK_ELEMENTS:
        return max(64, _ON_HOSTS // vocabulary)
    return min(_MOST_TOKENS, max(64, _CHUNK_ELEMENTS[device] // vocabulary))


def chunk_bytes(vocabulary: int, tokens: int) -> int:
    """Most bytes that the logits of a chunk take, with what is made of them."""
    return _BYTES_PER_LOGIT * vocabulary * tokens


@contextlib.contextmanager
def chunks_of(tokens: int) -> Iterator[None]:
    """A context in which plain heads make the logits of so many tokens at a time, whatever the device."""
    _CHUNKS.append(tokens)
    try:
        yield
    finally:
        _CHUNKS.pop()


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
    chunk: int | None = None,
    scaling: LogitScaling | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-probs (and entropies, else zeros) of `targets` under softmax(scaling(head(hidden)) / temperature).

    Logits exist for `chunk` tokens at a time (None: `head_chunk` of them); the backward pass computes them again. A
    linear head is differentiated by hand, chunk by chunk, and the gradient of its weight is added up in float32
    whatever its dtype, so that it does not depend on the number of chunks. Any other head is called as it is.
    """
    scaling = scaling or LogitScaling()
    if not len(hidden):
        empty = hidden.sum(dim=-1)
        return empty, empty
    if (linear := as_linear_head(head)) is not None:
        size = chunk or (_CHUNKS[-1] if _CHUNKS else head_chunk(linear.weight.shape[0], hidden.device.type))
        settings = ChunkSettings(temperature=temperature, with_entropy=with_entropy, chunk=size, scaling=scaling)
        return LinearLogProbs.apply(hidden, linear.weight, linear.bias, targets, settings)  # type: ignore
    return _module_log_probs(hidden, head, targets, (temperature, with_entropy, chunk or 1024, scaling))


def chunked_candidate_log_probs(
    hidden: Float[Tensor, "tokens hidden"],
    head: Callable[[Tensor], Tensor],
    candidates: Int[Tensor, "tokens k"],
    *,
    temperature: float = 1.0,
    chunk: int = CANDIDATE_CHUNK,
    scaling: LogitScaling | None = None,
) -> Float[Tensor, "tokens k"]:
    """Log-probs of k tokens at each position; logits exist for `chunk` positions at a time, in both passes."""
    scaling = scaling or LogitScaling()

    def picked(part: Tensor, ids: Tensor) -> Tensor:
        logits = scaling.apply(full_precision(head(part))) / temperature
        return logits.log_softmax(dim=-1).gather(-1, ids)

    parts = [
        checkpoint(picked, part, ids, use_reentrant=False)
        if torch.is_grad_enabled() and hidden.requires_grad
        else picked(part, ids)
        for part, ids in zip(hidden.split(chunk), candidates.split(chunk), strict=True)
    ]
    return torch.cat(parts) if parts else hidden[:, :1] * candidates  # type: ignore[arg-type]


def chunked_log_collision(
    hidden: Float[Tensor, "tokens hidden"],
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float = 1.0,
    chunk: int = 256,
    scaling: LogitScaling | None = None,
) -> Float[Tensor, " tokens"]:
    """log sum_v p(v)^2 at each position, p = softmax(scaling(head(hidden)) / temperature); no gradient.

    That is the log-probability that two tokens drawn at the position are the same one.
    """
    scaling = scaling or LogitScaling()
    found = [hidden.new_zeros(0, dtype=torch.float64 if hidden.dtype is torch.float64 else torch.float32)]
    with torch.no_grad():
        for part in hidden.split(chunk):
            logits = scaling.apply(full_precision(head(part))) / temperature
            found.append((2 * logits.log_softmax(dim=-1)).logsumexp(dim=-1))
    return torch.cat(found)


def chunked_top_k(
    hidden: Float[Tensor, "tokens hidden"],
    head: Callable[[Tensor], Tensor],
    k: int,
    *,
    temperature: float = 1.0,
    chunk: int = 256,
    scaling: LogitScaling | None = None,
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """The k most likely tokens at each position, log-probs and ids; no gradient."""
    scaling = scaling or LogitScaling()
    log_probs, ids = [hidden.new_zeros(0, k, dtype=torch.float32)], [hidden.new_zeros(0, k, dtype=torch.long)]
    with torch.no_grad():
        for part in hidden.split(chunk):
            logits = scaling.apply(full_precision(head(part))) / temperature
            best = logits.log_softmax(dim=-1).topk(k)
            log_probs.append(best.values.float())
            ids.append(best.indices)
    return torch.cat(log_probs), torch.cat(ids)


def _module_log_probs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    settings: tuple[float, bool, int, LogitScaling],
) -> tuple[Tensor, Tensor]:
    """By calling the head as a module, under activation checkpointing."""
    temperature, with_entropy, chunk, scaling = settings

    def scores(part: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = scaling.apply(full_precision(head(part))) / temperature
        log_probs = log_probs_from_logits(logits, target)
        return log_probs, entropy_from_logits(logits) if with_entropy else torch.zeros_like(log_probs)

    parts = []
    for part, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        if torch.is_grad_enabled() and hidden.requires_grad:
            parts.append(checkpoint(scores, part, target, use_reentrant=False))
        else:
            parts.append(scores(part, target))
    log_probs, entropy = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)
