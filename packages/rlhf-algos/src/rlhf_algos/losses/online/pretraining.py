"""Likelihood terms beside a policy loss: of pretraining data (PPO-ptx) and of the right answers (VAPO)."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Bool
from rlhf_core import Batch, ConfigError, RaggedBatch
from torch import Tensor

from rlhf_algos.losses.online.terms import PolicyTermsConfig, policy_weight

AnyBatch = TypeVar("AnyBatch", Batch, RaggedBatch)


def mix_pretraining(
    batch: AnyBatch, pretraining: Batch | RaggedBatch, coef: float, config: PolicyTermsConfig
) -> AnyBatch:
    """Rows of both, with the column `ptx_coef` [rows] that every policy loss understands.

    Pretraining data keeps the model at what it knew (PPO-ptx, Ouyang et al. 2022, 2203.02155, eq. 2).

    The step then minimises policy loss + coef * mean negative log-likelihood per token of the pretraining rows. The
    two means have different denominators; the column holds their ratio, hence both must be all rows of an optimizer
    step, over all ranks.

    Args:
        batch: the prepared policy rows.
        pretraining: rows whose `response_mask` is True where a token is to be learnt; other columns are dropped.
        coef: weight of the pretraining term.
        config: of the policy loss; its aggregation gives the policy term's denominator.

    Raises:
        ConfigError: a batch of pairs; or samples of another temperature than 1, at which log-probs are not those of
            the text.
    """
    if batch.rows_per_unit != 1 or pretraining.rows_per_unit != 1:
        raise ConfigError("mix_pretraining takes batches of single rows (rows_per_unit=1)")
    if batch.temperature != 1:
        raise ConfigError(
            f"mix_pretraining: the samples have temperature {batch.temperature:g}, at which all log-probs of the "
            "step are taken; the likelihood of a text is that at temperature 1"
        )
    ours, theirs = RaggedBatch.of(batch), RaggedBatch.of(pretraining)
    named = theirs.sample_ids or tuple(f"pretraining {row}" for row in range(theirs.rows))
    weight = coef * policy_weight(ours.only(()).padded(), config) / max(theirs.response_tokens, 1)
    coefs = torch.tensor([0.0] * ours.rows + [weight] * theirs.rows)
    mixed = ours.followed_by(replace(theirs, sample_ids=named)).with_columns(ptx_coef=coefs)
    return mixed if isinstance(batch, RaggedBatch) else mixed.padded()  # type: ignore[return-value]


def with_likelihood(batch: Batch, right: Bool[Tensor, " rows"], coef: float, config: PolicyTermsConfig) -> Batch:
    """Add the column `likelihood_weight` [rows], by which every policy loss learns its right answers by heart, too.

    The step then minimises policy loss + coef * mean negative log-likelihood per token of the right responses
    (VAPO's positive-example loss, Yue et al. 2025, 2504.05118: coef 0.1). The two means have different
    denominators; the column holds their ratio.

    Args:
        batch: the whole global batch, with `prompt_tokens` for the aggregation `prompt_mean`.
        right: which responses are right.
        coef: weight of the likelihood term.
        config: of the policy loss; its aggregation gives the policy term's denominator.
    """
    tokens = int(batch.response_mask[right].sum())
    each = coef * policy_weight(batch, config) / max(tokens, 1)
    column = torch.full((batch.rows,), each, dtype=torch.float32, device=batch.token_ids.device)
    return batch.with_columns(likelihood_weight=column.masked_fill(~right, 0))
