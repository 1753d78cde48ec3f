"""Log-probs of whole responses, and the rows of a preference pair."""

from __future__ import annotations

from jaxtyping import Float
from rlhf_core import Batch, ConfigError, DataError, ModelOutputs, masked_sum
from torch import Tensor


def response_log_probs(outputs: ModelOutputs, batch: Batch, *, mean: bool = False) -> Float[Tensor, " rows"]:
    """Sum (or mean over tokens) of the log-probs of each response; 0 for an empty one.

    Raises:
        ConfigError: the engine was not asked for log_probs.
    """
    if outputs.log_probs is None:
        raise ConfigError("this loss needs log_probs among the engine's outputs")
    total = masked_sum(outputs.log_probs, batch.response_mask, dim=1)
    return total / response_lengths(batch) if mean else total


def reference_log_probs(batch: Batch, *, mean: bool = False) -> Float[Tensor, " rows"]:
    """The column `ref_log_probs_sum` [rows], or its mean per token."""
    total = batch["ref_log_probs_sum"]
    return total / response_lengths(batch) if mean else total


def shared_log_probs(outputs: ModelOutputs, batch: Batch) -> Float[Tensor, " rows"]:
    """Log-probs of each response of a pair, summed over its first tokens: as many as the shorter of the two has.

    The reference's are the column `ref_log_probs_shared` [rows].
    """
    mask = batch.response_mask
    shorter = mask.sum(dim=1).view(-1, batch.rows_per_unit).min(dim=1).values.repeat_interleave(batch.rows_per_unit)
    within = mask & (mask.long().cumsum(dim=1) <= shorter.unsqueeze(1))
    return masked_sum(outputs.log_probs, within, dim=1)  # type: ignore[arg-type]


def response_lengths(batch: Batch) -> Float[Tensor, " rows"]:
    """Counted tokens per row, at least 1 so that one can divide by them."""
    return batch.response_mask.sum(dim=1).clamp(min=1)


def split_pairs(
    values: Float[Tensor, " rows"], batch: Batch
) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """Values of the chosen and of the rejected rows, which alternate: chosen, rejected, chosen, ...

    Raises:
        DataError: the rows are not marked as pairs.
    """
    if batch.rows_per_unit != 2:
        raise DataError(
            f"preference losses need rows in pairs (chosen, rejected) and rows_per_unit=2, got rows_per_unit="
            f"{batch.rows_per_unit}"
        )
    return values[0::2], values[1::2]
