"""Log-probs through a linear head, differentiated by hand: logits exist for a chunk of tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

_OUTER_ROWS = 8192  # rows of a head's gradient that are added to at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitScaling:
    """What some models do to the head's output: `soft_cap * tanh(factor * logits / soft_cap)`."""

    factor: float = 1.0
    soft_cap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """The model's logits from the head's output; works in place where it can."""
        logits = logits if self.factor == 1.0 else logits * self.factor
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


class LinearHead:
    """A linear head as its weight and bias, to be used without a call of its module and so without its hooks.

    ZeRO-3's hooks would gather the weight in every call, and ranks have different numbers of calls. Whoever makes
    this has the weight gathered while it is used, in the backward pass too.
    """

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    @property
    def weight(self) -> Tensor:
        """[vocab, hidden]."""
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        """[vocab]."""
        return self.module.bias

    def __call__(self, hidden: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens vocab"]:
        """The head's output."""
        return nn.functional.linear(hidden, self.weight, self.bias)


def as_linear_head(head: Any) -> LinearHead | None:
    """The head's weight and bias, if they are all it needs and are there."""
    if isinstance(head, LinearHead):
        return head
    if type(head) is not nn.Linear:
        return None
    # DeepSpeed marks the parameters it shards; outside a module call they are empty.
    hooks = head._forward_pre_hooks or head._forward_hooks or head._backward_hooks
    plain = not hooks and not hasattr(head.weight, "ds_id") and head.weight.dim() == 2
    return LinearHead(head) if plain else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSettings:
    """How logits are made of a head's output, and for how many tokens at a time."""

    temperature: float
    with_entropy: bool
    chunk: int
    scaling: LogitScaling


class LinearLogProbs(torch.autograd.Function):
    """Log-probs and entropies through a linear head; logits are recomputed chunk by chunk for the gradient.

    With p = softmax(z), H the entropy and z the logits after temperature: d log p[y] / dz = onehot(y) - p and
    dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: ChunkSettings
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets, and entropies or zeros."""
        wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        log_probs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        entropy = torch.zeros_like(log_probs)
        normalised = torch.empty(0)
        for start in range(0, len(hidden), settings.chunk):
            part = slice(start, start + settings.chunk)
            normalised = _log_softmax(hidden[part], weight, bias, settings)
            log_probs[part] = normalised.gather(-1, targets[part, None]).squeeze(-1)
            if settings.with_entropy:
                entropy[part] = -torch.linalg.vecdot(normalised.exp(), normalised)
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        # The backward pass comes next and starts with the last chunk, so that one is not computed again.
        ctx.last = normalised if any(ctx.needs_input_grad) else None
        ctx.set_materialize_grads(True)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias."""
        for_log_probs, for_entropy = grads
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        settings: ChunkSettings = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # An entropy that is only reported has no gradient, and costs none of the passes over the logits for it.
        entropies = settings.with_entropy and bool(for_entropy.any())
        wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        to_bias = torch.zeros_like(bias, dtype=wide) if needs_bias and bias is not None else None
        last, ctx.last = ctx.last, None
        for start in reversed(range(0, len(hidden), settings.chunk)):
            part = slice(start, start + settings.chunk)
            normalised = _log_softmax(hidden[part], weight, bias, settings) if last is None else last
            last = None
            logits_grad = _logits_grad(
                normalised,
                targets[part],
                for_log_probs[part],
                (for_entropy[part], entropy[part]) if entropies else None,
            )
            if settings.scaling.soft_cap is not None:
                capped = _raw_logits(hidden[part], weight, bias, settings).div_(settings.scaling.soft_cap).tanh_()
                logits_grad.mul_(1 - capped.square_())
            logits_grad = logits_grad.mul_(settings.scaling.factor / settings.temperature)
            if to_bias is not None:
                to_bias += logits_grad.sum(dim=0)
            if to_weight is not None:
                _add_outer(to_weight, logits_grad, hidden[part])
            if to_hidden is not None:
                torch.mm(logits_grad.to(weight.dtype), weight, out=to_hidden[part])
        narrow = weight.dtype
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(narrow),
            None if to_bias is None else to_bias.to(narrow),
            None,
            None,
        )


def _add_outer(total: Tensor, logits_grad: Tensor, hidden: Tensor) -> None:
    """total += logits_grad.T @ hidden, in the precision of `total`, a slice of the vocabulary at a time."""
    for start in range(0, len(total), _OUTER_ROWS):
        rows = slice(start, start + _OUTER_ROWS)
        left = logits_grad[:, rows].T
        if hidden.dtype is total.dtype:
            total[rows].addmm_(left, hidden)
        elif hidden.is_cuda:
            # Tensor cores take 16-bit factors and add up in float32; the sum is kept as it is.
            total[rows] += torch.mm(left.to(hidden.dtype), hidden, out_dtype=total.dtype)
        else:
            total[rows].addmm_(left, hidden.to(total.dtype))


def _raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: ChunkSettings) -> Tensor:
    logits = full_precision(nn.functional.linear(hidden, weight, bias))
    return logits if settings.scaling.factor == 1.0 else logits.mul_(settings.scaling.factor)


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: ChunkSettings) -> Tensor:
    """[chunk, vocab] log-probs, with no more than one other array of that size alive at any time."""
    logits = _raw_logits(hidden, weight, bias, settings)
    if (cap := settings.scaling.soft_cap) is not None:
        logits = logits.div_(cap).tanh_().mul_(cap)
    if settings.temperature != 1.0:
        logits.div_(settings.temperature)
    return torch.log_softmax(logits, dim=-1)


def _logits_grad(
    normalised: Tensor, targets: Tensor, for_log_probs: Tensor, entropies: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient with respect to the logits after temperature; overwrites `normalised`."""
    if entropies is None:
        grad = normalised.exp_().mul_(-for_log_probs[:, None])
    else:
        for_entropy, entropy = entropies
        grad = normalised.exp()
        normalised.add_(entropy[:, None]).mul_(for_entropy[:, None]).add_(for_log_probs[:, None])
        grad.mul_(normalised.neg_())
    return grad.scatter_add_(1, targets[:, None], for_log_probs[:, None].to(grad.dtype))


def full_precision(values: Tensor) -> Tensor:
    """In float32, if it was in 16 bits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
