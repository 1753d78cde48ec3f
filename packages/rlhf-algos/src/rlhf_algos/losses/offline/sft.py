"""Likelihood losses on the counted tokens: SFT and DFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core import Batch, ConfigError, LossTerms, Mean, ModelOutputs, mean_of

from rlhf_algos.choices import check_choices
from rlhf_algos.losses.aggregation import Aggregation, add_aux_loss, aggregate, check_aggregation

SFTLoss = Literal["nll", "dft"]
"""`nll`: -log p; `dft`: -sg(p) log p, which takes the likelihood's own 1 / p out of the gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """Configuration of `sft`."""

    loss: SFTLoss = "nll"
    """See `SFTLoss`."""
    aggregation: Aggregation = "token_mean"
    """`token_mean` in TRL and by default in OpenRLHF."""
    max_length: int = 0
    """Divisor of the aggregation `max_length`, in tokens."""
    count_empty_rows: bool = True
    """Whether a row without a counted token is part of a mean over rows: True in TRL; False in OpenRLHF."""
    aux_loss_coef: float = 0.0
    """See `PolicyTermsConfig.aux_loss_coef`."""

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length)
        if self.aggregation == "prompt_mean":
            raise ConfigError("sft: aggregation 'prompt_mean' is for policy losses; write one of the others")
        check_choices("sft", self, loss=SFTLoss)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("log_probs", "aux_loss") if self.aux_loss_coef else ("log_probs",)


def sft(outputs: ModelOutputs, batch: Batch, config: SFTConfig) -> LossTerms:
    """Negative log-likelihood of the tokens of `response_mask`, or DFT (Wu et al. 2025, eq. 9).

    An optional column `token_weights` [rows, length] scales each token, the denominator staying the number of
    tokens. Metrics: sft_loss (always -log p, in nats per token), and token_probability.
    """
    if outputs.log_probs is None:
        raise ConfigError("sft needs log_probs among the engine's outputs")
    mask = batch.response_mask
    log_probs = outputs.log_probs.masked_fill(~mask, 0)
    probabilities = log_probs.detach().clamp(max=0).exp()
    per_token = -log_probs * probabilities if config.loss == "dft" else -log_probs
    if "token_weights" in batch:
        per_token = per_token * batch["token_weights"].masked_fill(~mask, 0)
    total, weight = aggregate(
        per_token,
        mask,
        config.aggregation,
        max_length=config.max_length,
        count_empty_rows=config.count_empty_rows,
    )
    metrics = {
        "sft_loss": mean_of(-log_probs, mask),
        "objective": Mean(total=float(total.detach()), weight=float(weight)),
        "token_probability": mean_of(probabilities, mask),
    }
    return add_aux_loss(LossTerms(total=total, weight=weight, metrics=metrics), outputs, config.aux_loss_coef)
