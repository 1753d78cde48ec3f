"""KTO: learning from responses marked desirable or undesirable, without pairs (Ethayarajh et al. 2024).

Columns: `desirable` [rows] bool; `ref_log_probs_sum` [rows]; `kl_baseline` [rows], the reference point z0. z0 is a
statistic of the whole batch, so it is computed before the step and travels as a column; micro-batches then do not
matter:

    other = mismatched_rows(batch)                           # each prompt with another prompt's response
    z0 = kl_baseline(sum of engine.score(other) log-probs, sum of the reference's)
    batch = with_kl_baseline(batch, z0)                      # after averaging z0 over ranks, if there are any
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from rlhf_core import Batch, ConfigError, LossTerms, ModelOutputs, mean_of, pad_rows
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_algos.choices import check_choices
from rlhf_algos.losses.aggregation import add_aux_loss
from rlhf_algos.losses.offline.responses import reference_log_probs, response_log_probs

KTOLoss = Literal["kto", "apo_zero", "bco"]
"""`kto` with the reference point z0; `apo_zero` with z0 = 0 (TRL's `apo_zero_unpaired`); `bco`, binary
classifier optimisation (Jung et al. 2024, 2404.04656): -log sigmoid(beta h - delta) where desirable, else -log
sigmoid(delta - beta h), with delta from the column `reward_shift` [rows], the mean of beta h over the batch
(TRL keeps a running mean over batches)."""

KTOBaseline = Literal["mismatched", "opposite"]
"""Where z0 comes from: `mismatched` prompts and responses (the paper, TRL), or the rows of the `opposite` kind
(OpenRLHF's former `VanillaKTOLoss`, here without a gradient of the baseline); see `opposite_baselines`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOConfig:
    """Configuration of `kto`."""

    beta: float = 0.1
    """Strength of the pull towards the reference."""
    desirable_weight: float = 1.0
    """Weight of a desirable response; see `balanced_weights` for unbalanced data."""
    undesirable_weight: float = 1.0
    """Weight of an undesirable response."""
    loss: KTOLoss = "kto"
    """See `KTOLoss`."""
    baseline: KTOBaseline = "mismatched"
    """See `KTOBaseline`; for the loss `kto`."""
    aux_loss_coef: float = 0.0
    """See `PolicyTermsConfig.aux_loss_coef`."""

    def __post_init__(self) -> None:
        check_choices("kto", self, loss=KTOLoss, baseline=KTOBaseline)
        if self.beta <= 0 or self.desirable_weight < 0 or self.undesirable_weight < 0:
            raise ConfigError(f"kto: beta must be positive and the weights must not be negative, got {self}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("log_probs", "aux_loss") if self.aux_loss_coef else ("log_probs",)

    @property
    def needs_kl_baseline(self) -> bool:
        """True if the batch must have the column `kl_baseline`."""
        return self.loss == "kto"

    @property
    def needs_partners(self) -> bool:
        """True if the baseline comes from mismatched prompts and responses."""
        return self.needs_kl_baseline and self.baseline == "mismatched"


def kto(outputs: ModelOutputs, batch: Batch, config: KTOConfig) -> LossTerms:
    """KTO (eq. 7), a mean over rows.

    With h = log(policy / reference) of a response: desirable rows lose w_d (1 - sigmoid(beta (h - z0))),
    undesirable ones w_u (1 - sigmoid(beta (z0 - h))). The sum of both kinds is divided by the number of rows,
    not by the sum of weights (as in TRL and OpenRLHF). For the other losses see `KTOLoss`.

    Metrics: kto_loss, kl_baseline, rewards_desirable, rewards_undesirable (beta h).
    """
    if config.needs_kl_baseline and "kl_baseline" not in batch:
        raise ConfigError(
            "kto needs the column 'kl_baseline'; add it with with_kl_baseline(batch, kl_baseline(...))"
        )
    desirable = batch["desirable"].bool()
    log_ratio = response_log_probs(outputs, batch) - reference_log_probs(batch)
    baseline = batch["kl_baseline"] if config.needs_kl_baseline else torch.zeros_like(log_ratio)
    gain = config.beta * (log_ratio - baseline)
    weights = torch.full_like(gain, config.undesirable_weight).masked_fill(desirable, config.desirable_weight)
    if config.loss == "bco":
        shift = batch["reward_shift"].to(gain.dtype)
        losses = -weights * logsigmoid(torch.where(desirable, gain - shift, shift - gain))
    else:
        losses = weights * torch.sigmoid(torch.where(desirable, -gain, gain))
    metrics = {
        "kto_loss": mean_of(losses),
        "kl_baseline": mean_of(baseline),
        "rewards_desirable": mean_of(config.beta * log_ratio, desirable),
        "rewards_undesirable": mean_of(config.beta * log_ratio, ~desirable),
    }
    total = losses.sum()
    weight = torch.tensor(float(batch.rows), device=total.device)
    return add_aux_loss(LossTerms(total=total, weight=weight, metrics=metrics), outputs, config.aux_loss_coef)


def mismatched_rows(batch: Batch, *, pad_token_id: int = 0) -> Batch:
    """Each row's prompt with the response of the row before it (the first with the last), without columns.

    The prompt is what precedes the first counted token, the response everything from there on. Rotating by one is
    what the paper's code and TRL do; take as many rows at once as there are, for a better estimate.
    """
    prompts, responses = zip(*(_cut(batch, row) for row in range(batch.rows)), strict=True)
    rows = [(prompts[row], *responses[row - 1]) for row in range(batch.rows)]
    tokens = [[*prompt, *response] for prompt, response, _ in rows]
    masks = [[*([False] * len(prompt)), *mask] for prompt, _, mask in rows]
    return Batch(
        token_ids=pad_rows(tokens, value=pad_token_id, dtype=torch.long),
        attention_mask=pad_rows([[True] * len(row) for row in tokens], value=False, dtype=torch.bool),
        response_mask=pad_rows(masks, value=False, dtype=torch.bool),
        temperature=batch.temperature,
        sample_ids=batch.sample_ids,
        images=batch.images,
    )


def _cut(batch: Batch, row: int) -> tuple[list[int], tuple[list[int], list[bool]]]:
    length = int(batch.lengths[row])
    tokens, mask = batch.token_ids[row, :length].tolist(), batch.response_mask[row, :length].tolist()
    start = mask.index(True) if True in mask else length
    return tokens[:start], (tokens[start:], mask[start:])


def kl_baseline(log_probs_sum: Float[Tensor, " rows"], ref_log_probs_sum: Float[Tensor, " rows"]) -> float:
    """z0 = max(0, mean log(policy / reference)) over mismatched rows, in nats.

    The maximum comes after the mean over all ranks (TRL, OpenRLHF): pass the rows of all ranks at once.
    """
    return max(0.0, float((log_probs_sum - ref_log_probs_sum).double().mean())) if len(log_probs_sum) else 0.0


def opposite_baselines(
    log_ratio: Float[Tensor, " rows"], desirable: Bool[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """z0 from the batch itself, without mismatched rows (OpenRLHF's `VanillaKTOLoss`).

    Each desirable row gets max(0, mean log-ratio of the undesirable ones), and the reverse; 0 if there are none.
    """
    up, down = (log_ratio[rows].mean().clamp(min=0) if rows.any() else 0.0 for rows in (desirable, ~desirable))
    return torch.where(desirable, down, up).to(log_ratio.dtype)


def bco_shift(log_ratio: Float[Tensor, " rows"], beta: float) -> float:
    """delta = mean of beta log(policy / reference) over all rows of the global batch, for the loss `bco`."""
    return beta * float(log_ratio.double().mean()) if len(log_ratio) else 0.0


def with_kl_baseline(batch: Batch, value: float | Float[Tensor, " rows"]) -> Batch:
    """Add the column `kl_baseline` [rows]: one number for all rows, or one each."""
    column = torch.as_tensor(value, dtype=torch.float32, device=batch.token_ids.device)
    return batch.with_columns(kl_baseline=column.expand(batch.rows).clone())


def balanced_weights(desirable: int, undesirable: int, *, ratio: float = 1.0) -> tuple[float, float]:
    """Weights (desirable, undesirable) for unbalanced data (eq. 8): w_d n_d = ratio * w_u n_u.

    The larger class keeps weight 1. The paper advises a ratio between 1 and 4/3.

    >>> balanced_weights(100, 300), balanced_weights(200, 100, ratio=1.25)
    ((3.0, 1.0), (1.0, 1.6))
    """
    if desirable < 1 or undesirable < 1:
        raise ConfigError(
            f"kto: needs desirable and undesirable responses, got {desirable} and {undesirable}; "
            "with one kind alone use SFT"
        )
    quotient = ratio * undesirable / desirable
    return (quotient, 1.0) if quotient >= 1 else (1.0, 1 / quotient)
