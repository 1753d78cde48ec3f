"""Drawing the next token of several samples at once, each with its own settings; scoring tokens that are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from rlhf_core import SamplingConfig
from torch import Tensor


def draw_tokens(
    logits: Float[Tensor, "rows vocab"],
    samplings: Sequence[SamplingConfig],
    generators: Sequence[torch.Generator],
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """One token per row and its log-prob under the distribution it was drawn from.

    Uses the Gumbel-max trick: argmax(log p + g), g = -log(Exp(1)) noise, is a draw from p. Each row takes its
    noise from its own (CPU) generator, so a sample does not depend on what else is in the batch. Rows with
    temperature 0 get no noise.
    """
    log_probs = candidate_log_probs(logits, samplings)
    noise = torch.zeros(logits.shape)
    for row, (sampling, generator) in enumerate(zip(samplings, generators, strict=True)):
        if sampling.temperature > 0:
            noise[row].exponential_(generator=generator).log_().neg_()
    tokens = (log_probs + noise.to(log_probs.device)).argmax(dim=-1)
    return tokens, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def candidate_log_probs(
    logits: Float[Tensor, "rows vocab"], samplings: Sequence[SamplingConfig]
) -> Float[Tensor, "rows vocab"]:
    """log softmax(logits / temperature), cut to each row's candidates and renormalised, in float32.

    Penalties come before: see `penalise`. The cuts are vLLM's, in its order: min-p; top-k, where tokens as likely
    as the last one stay; then top-p, the smallest set that has this share of the mass which the cuts before it have
    left (Holtzman et al. 2020). For top-k with top-p, Transformers does the same; it puts min-p last.

    Tokens outside a row's candidate set have -inf. Greedy rows (temperature 0) count as temperature 1.
    """
    meanings = [sampling.meaning for sampling in samplings]
    temperature = torch.tensor([m.temperature for m in meanings], device=logits.device)
    log_probs = (logits.float() / temperature.unsqueeze(-1)).log_softmax(dim=-1)
    if not any(meaning.truncated for meaning in meanings):
        return log_probs

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=logits.device).unsqueeze(-1)

    vocab = logits.shape[-1]
    ordered, order = log_probs.exp().sort(dim=-1, descending=True)
    keep = ordered >= column([m.min_p for m in meanings]) * ordered[:, :1]
    last = column([min(m.top_k or vocab, vocab) - 1 for m in meanings])
    keep &= ordered >= ordered.gather(-1, last)
    left = ordered.where(keep, 0.0)
    # A token stays if the mass before it falls short of top_p.
    keep &= left.cumsum(dim=-1) - left < column([m.top_p for m in meanings]) * left.sum(dim=-1, keepdim=True)
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter(-1, order, keep)
    return log_probs.masked_fill(~kept, -torch.inf).log_softmax(dim=-1)


def penalise(
    logits: Float[Tensor, " vocab"], sampling: SamplingConfig, prompt: Sequence[int], sampled: Sequence[int]
) -> None:
    """Change the logits before a token in place, by what the sample has before it: vLLM's definition, in its order.

    Repetition counts tokens of the prompt and the sample; frequency and presence those of the sample alone.
    """

    def ids(tokens: Sequence[int]) -> Int[Tensor, " tokens"]:
        found = torch.tensor(list(tokens), dtype=torch.long, device=logits.device)
        return found[found < len(logits)]  # tokens that stand for images may be read and never written

    if sampling.repetition_penalty != 1:
        seen = ids([*prompt, *sampled]).unique()
        before = logits[seen]
        by = sampling.repetition_penalty
        logits[seen] = torch.where(before > 0, before / by, before * by)
    if sampling.counts_sampled and sampled:
        seen, times = ids(sampled).unique(return_counts=True)
        logits[seen] -= sampling.frequency_penalty * times + sampling.presence_penalty


@torch.inference_mode()
def score_rows(model: Any, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs of each row's tokens, from the second on, at temperature 1. Each row runs by itself."""
    scores = []
    for row in rows:
        ids = torch.tensor([list(row)], device=model.device)
        log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
        scores.append(log_probs.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist())
    return scores
