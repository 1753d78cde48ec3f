"""Likelihood terms beside a policy loss: of pretraining data (PPO-ptx) and of the right answers (VAPO)."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from rlhf_core import Batch, ConfigError
from torch import Tensor

from rlhf_algos.losses.online.terms import PolicyTermsConfig, policy_weight


def mix_pretraining(batch: Batch, pretraining: Batch, coef: float, config: PolicyTermsConfig) -> Batch:
    """Rows of both, with the column `ptx_coef` [rows] that every policy loss understands.

    Pretraining data keeps the model at what it knew (PPO-ptx, Ouyang et al. 2022).

    The step then minimises policy loss + coef * mean negative log-likelihood per token of the pretraining rows. The
    two means have different denominators; the column holds their ratio, hence both must be the whole global batch.

    Args:
        batch: the prepared policy rows.
        pretraining: rows whose `response_mask` is True where a token is to be learnt; other columns are dropped.
        coef: weight of the pretraining term.
        config: of the policy loss; its aggregation gives the policy term's denominator.
    """
    if batch.rows_per_unit != 1 or pretraining.rows_per_unit != 1:
        raise ConfigError("mix_pretraining takes batches of single rows (rows_per_unit=1)")
    weight = policy_weight(batch, config)
    tokens = max(int(pretraining.response_mask.sum()), 1)
    width = max(batch.token_ids.shape[1], pretraining.token_ids.shape[1])
    rows = pretraining.rows

    def stack(ours: Tensor, theirs: Tensor | None) -> Tensor:
        theirs = ours.new_zeros((rows, *ours.shape[1:])) if theirs is None else theirs.to(ours)
        if ours.dim() == 1:
            return torch.cat([ours, theirs])
        return torch.cat([_widen(ours, width), _widen(theirs, width)])

    ours = torch.zeros(batch.rows, dtype=torch.float32, device=batch.token_ids.device)
    names = batch.sample_ids and (
        *batch.sample_ids,
        *(pretraining.sample_ids or tuple(f"pretraining {row}" for row in range(rows))),
    )
    return Batch(
        token_ids=stack(batch.token_ids, pretraining.token_ids),
        attention_mask=stack(batch.attention_mask, pretraining.attention_mask),
        response_mask=stack(batch.response_mask, pretraining.response_mask),
        columns={
            **{name: stack(column, None) for name, column in batch.columns.items()},
            "ptx_coef": torch.cat([ours, ours.new_full((rows,), coef * weight / tokens)]),
        },
        temperature=batch.temperature,
        sample_ids=names,
    )


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


def _widen(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))
