"""Learning from a teacher's distribution: forward and reverse KL, generalised JSD, top-k, and on-policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from rlhf_core import Batch, ConfigError, LossTerms, Mean, ModelOutputs, masked_sum, mean_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_algos.choices import check_choices

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
"""forward_kl: KL(teacher || student), mean-seeking; reverse_kl: KL(student || teacher), mode-seeking; jsd: beta
KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student (GKD, Agarwal et al. 2024)."""

OtherTokens = Literal["lump", "renormalize"]
"""Top-k only: the tokens outside are one further outcome, or are left out and both sides made to sum to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceConfig:
    """Which divergence between two next-token distributions."""

    divergence: Divergence = "forward_kl"
    """See `Divergence`. OpenRLHF's KD loss is the forward KL without the teacher's entropy: the same gradient."""
    beta: float = 0.5
    """Mixture weight of `jsd`, strictly between 0 and 1. TRL's beta of 0 is forward_kl, of 1 reverse_kl."""
    temperature: float = 1.0
    """Both logits are divided by it."""
    other_tokens: OtherTokens = "lump"
    """See `OtherTokens`."""

    def __post_init__(self) -> None:
        check_choices("distillation", self, divergence=Divergence, other_tokens=OtherTokens)
        if not 0 < self.beta < 1:
            raise ConfigError(
                f"distillation: beta must be strictly between 0 and 1, got {self.beta}; write "
                "divergence='forward_kl' for 0 and 'reverse_kl' for 1"
            )
        if self.temperature <= 0:
            raise ConfigError(f"distillation: temperature must be positive, got {self.temperature}")


def divergence_from_logits(
    student_logits: Float[Tensor, "*tokens vocab"],
    teacher_logits: Float[Tensor, "*tokens vocab"],
    config: DivergenceConfig,
) -> Float[Tensor, "*tokens"]:
    """The divergence at each token, in nats. Call it in chunks of tokens: the logits are [tokens, vocab]."""
    student = (student_logits / config.temperature).log_softmax(dim=-1)
    teacher = (teacher_logits / config.temperature).log_softmax(dim=-1)
    return _divergence(student, teacher, config)


def chunked_divergence(
    student: tuple[Float[Tensor, "tokens hidden"], Callable[[Tensor], Tensor]],
    teacher: tuple[Float[Tensor, "tokens teacher_hidden"], Callable[[Tensor], Tensor]],
    config: DivergenceConfig,
    *,
    chunk: int = 512,
) -> Float[Tensor, " tokens"]:
    """The divergence at each token from last hidden states and heads, as (states, head) of both models.

    Logits exist for `chunk` tokens at a time; the backward pass computes them again. The teacher gets no gradient.
    Its hidden size may differ, its vocabulary may not.
    """
    head, teacher_head = student[1], teacher[1]

    def part(states: Tensor, teacher_states: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = _wide(teacher_head(teacher_states))
        return divergence_from_logits(_wide(head(states)), teacher_logits, config)

    pieces = [
        checkpoint(part, *piece, use_reentrant=False) if torch.is_grad_enabled() else part(*piece)
        for piece in zip(student[0].split(chunk), teacher[0].detach().split(chunk), strict=True)
    ]
    return torch.cat(pieces) if pieces else student[0].sum(dim=-1)  # type: ignore[arg-type]


def divergence_from_top_k(
    student_logits: Float[Tensor, "*tokens vocab"],
    teacher_log_probs: Float[Tensor, "*tokens k"],
    teacher_ids: Int[Tensor, "*tokens k"],
    config: DivergenceConfig,
) -> Float[Tensor, "*tokens"]:
    """The divergence from a teacher of which only the k most likely tokens are known.

    Args:
        student_logits: over the whole vocabulary.
        teacher_log_probs: of the k tokens, at the temperature of `config`.
        teacher_ids: their token ids.
        config: `other_tokens` says what becomes of the rest.
    """
    student = (student_logits / config.temperature).log_softmax(dim=-1).gather(-1, teacher_ids)
    return divergence_of_known(student, teacher_log_probs, config)


def divergence_of_known(
    student: Float[Tensor, "*tokens k"], teacher: Float[Tensor, "*tokens k"], config: DivergenceConfig
) -> Float[Tensor, "*tokens"]:
    """The divergence between log-probs of the same k tokens, both at the temperature of `config`."""
    if config.other_tokens == "lump":
        student, teacher = (torch.cat([x, _log_remainder(x)], dim=-1) for x in (student, teacher))
    else:
        student, teacher = student.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    return _divergence(student, teacher, config)


def distillation_terms(
    divergence: Float[Tensor, "rows length"],
    mask: Bool[Tensor, "rows length"],
    *,
    kd_coef: float = 1.0,
    log_probs: Float[Tensor, "rows length"] | None = None,
) -> LossTerms:
    """Mean over tokens of kd_coef * divergence + (1 - kd_coef) * negative log-likelihood.

    `log_probs` of the data's tokens are needed where kd_coef is below 1 (OpenRLHF's `kd_coef`). Metrics: kd_loss,
    sft_loss.
    """
    total = kd_coef * masked_sum(divergence, mask)
    metrics = {"kd_loss": mean_of(divergence, mask)}
    if log_probs is not None:
        total = total - (1 - kd_coef) * masked_sum(log_probs, mask)
        metrics["sft_loss"] = mean_of(-log_probs, mask)
    elif kd_coef != 1:
        raise ConfigError(f"distillation: kd_coef {kd_coef} mixes in the likelihood, which needs log_probs")
    return LossTerms(total=total, weight=mask.sum().float(), metrics=metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnPolicyDistillationConfig:
    """Configuration of `on_policy_distillation`."""

    log_ratio_limit: float = 20.0
    """Clamp on log(student / teacher) and on the importance ratio's logarithm."""
    clip_range: float | None = None
    """PPO-style clip of the importance ratio against `old_log_probs`; None does not clip."""
    gamma: float = 0.0
    """0: a token is charged with its own gap alone. Above 0 with those of the tokens after it too, discounted by
    gamma per token: the whole gradient of the sequence's reverse KL at 1 (MiniLLM, Gu et al. 2024, 2306.08543)."""
    length_normalized: bool = False
    """With gamma: the weighted mean of these gaps and not their sum (MiniLLM's length normalisation)."""

    def __post_init__(self) -> None:
        if self.log_ratio_limit <= 0 or (self.clip_range is not None and self.clip_range < 0):
            raise ConfigError(f"on-policy distillation: limits must be positive, got {self}")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"on-policy distillation: gamma must be in [0, 1], got {self.gamma}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("log_probs",)


def on_policy_distillation(outputs: ModelOutputs, batch: Batch, config: OnPolicyDistillationConfig) -> LossTerms:
    """Reverse KL on the student's own samples, by policy gradient with the token's own KL as its cost.

    loss_t = -r_t A_t, A_t = sg(teacher_log_probs - log_probs), r_t = exp(log_probs - old_log_probs): each token is
    judged by the teacher (MiniLLM's single-step part, Gu et al. 2024; Lu 2025). With gamma, A_t is
    sum_{i >= t} gamma^(i - t) A_i over the sampled tokens, divided by sum_{i >= t} gamma^(i - t) if
    `length_normalized`. Columns: `teacher_log_probs`
    [rows, length]; `old_log_probs`, without which r_t = 1. Metrics: reverse_kl (nats per token), kd_loss.
    """
    if outputs.log_probs is None:
        raise ConfigError("on_policy_distillation needs log_probs among the engine's outputs")
    mask, limit = batch.response_mask, config.log_ratio_limit
    log_probs = outputs.log_probs.masked_fill(~mask, 0)
    gap = (log_probs.detach() - batch["teacher_log_probs"].masked_fill(~mask, 0)).clamp(-limit, limit)
    old = batch["old_log_probs"].masked_fill(~mask, 0) if "old_log_probs" in batch else log_probs.detach()
    ratio = (log_probs - old).clamp(-limit, limit).exp()
    cost = gap if not config.gamma else _cost_to_go(gap, mask, config)
    per_token = ratio * cost
    if config.clip_range is not None:
        per_token = torch.maximum(per_token, ratio.clamp(1 - config.clip_range, 1 + config.clip_range) * cost)
    total, weight = masked_sum(per_token, mask), mask.sum().float()
    metrics = {
        "reverse_kl": mean_of(gap, mask),
        "kd_loss": Mean(total=float(total.detach()), weight=float(weight)),
    }
    return LossTerms(total=total, weight=weight, metrics=metrics)


def _cost_to_go(gap: Tensor, mask: Tensor, config: OnPolicyDistillationConfig) -> Tensor:
    """Discounted sum, or mean, of the gaps from each counted token on."""
    result = torch.zeros_like(gap)
    total = weight = gap.new_zeros(gap.shape[0])
    for position in reversed(range(gap.shape[1])):
        counted = mask[:, position]
        total = torch.where(counted, gap[:, position] + config.gamma * total, total)
        weight = torch.where(counted, 1 + config.gamma * weight, weight)
        divisor = weight.clamp(min=1) if config.length_normalized else 1.0
        result[:, position] = torch.where(counted, total / divisor, 0.0)
    return result


def _divergence(student: Tensor, teacher: Tensor, config: DivergenceConfig) -> Tensor:
    if config.divergence == "forward_kl":
        return _kl(teacher, student)
    if config.divergence == "reverse_kl":
        return _kl(student, teacher)
    # An outcome that both exclude would have the gradient NaN.
    impossible = student.isneginf() & teacher.isneginf()
    student, teacher = student.masked_fill(impossible, 0), teacher.masked_fill(impossible, 0)
    mixture = torch.logaddexp(student + math.log1p(-config.beta), teacher + math.log(config.beta))
    mixture = mixture.masked_fill(impossible, 0)
    return config.beta * _kl(teacher, mixture) + (1 - config.beta) * _kl(student, mixture)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last dimension; an outcome with p = 0 contributes nothing."""
    impossible = log_p.isneginf()
    safe = log_p.masked_fill(impossible, 0)
    return (safe.exp() * (safe - log_q.masked_fill(impossible, 0))).masked_fill(impossible, 0).sum(dim=-1)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _log_remainder(log_probs: Tensor) -> Tensor:
    """log(1 - sum of probabilities) as one further outcome; at least log of the dtype's epsilon."""
    rest = 1 - log_probs.exp().sum(dim=-1, keepdim=True)
    return rest.clamp(min=torch.finfo(log_probs.dtype).eps).log()
