"""A batch with every column that a loss of ours reads, and the model outputs that go with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from rlhf_core import Batch, ModelOutputs
from torch import Tensor

LENGTHS = (7, 4, 9, 3, 6, 5, 8, 4)
"""Tokens of the eight rows."""
WIDTH = max(LENGTHS)


def sample_batch(*, rows_per_unit: int = 1, seed: int = 3) -> tuple[Batch, dict[str, Tensor]]:
    """Eight rows in float64 (or a few more, for whole units), and the outputs of a model by their field.

    In one row nothing counts, in another a single token does, and responses have gaps. The column `row_index`
    [rows] says which row of the outputs a row of the batch belongs to, however it is cut (see `sample_outputs`).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = LENGTHS + LENGTHS[: -len(LENGTHS) % rows_per_unit]
    rows, shape = len(lengths), (len(lengths), WIDTH)
    positions = torch.arange(WIDTH)
    attention = positions < torch.tensor(lengths)[:, None]
    response = attention & (positions >= 2) & (torch.rand(*shape, generator=generator) > 0.2)
    response[3] = False
    response[5] = positions == 3
    log_probs = -normal(*shape).abs() - 0.1
    columns = {
        "row_index": torch.arange(rows),
        **{
            name: log_probs + 0.3 * normal(*shape)
            for name in ("old_log_probs", "ref_log_probs", "teacher_log_probs", "rollout_log_probs")
        },
        "importance_weights": normal(*shape).abs(),
        "advantages": normal(*shape),
        "old_values": normal(*shape),
        "returns": normal(*shape),
        "step_labels": torch.rand(*shape, generator=generator, dtype=torch.float64),
        "ref_log_probs_sum": (log_probs * response).sum(1) + normal(rows),
        "desirable": torch.arange(rows) % 2 == 0,
        "from_reference": torch.arange(rows) % 4 == 1,
        "kl_baseline": torch.full((rows,), 0.2, dtype=torch.float64),
        "margin": normal(rows),
        "reward_shift": torch.full((rows,), 0.1, dtype=torch.float64),
    }
    columns["old_entropy"] = normal(*shape).abs()
    columns["old_log_collision"] = -normal(*shape).abs()
    columns["ref_log_probs_shared"] = columns["ref_log_probs_sum"] / 2
    groups = torch.tensor([0, 0, 1, 1, 2, 0, 1, 2, 0])[:rows]
    counted = response.sum(1).double()
    columns["prompt_tokens"] = torch.stack([counted[groups == group].sum() for group in groups])
    outputs = {
        "log_probs": log_probs,
        "entropy": normal(*shape).abs(),
        "log_collision": -normal(*shape).abs(),
        "values": normal(*shape),
        "scores": normal(rows),
    }
    batch = Batch(
        token_ids=torch.randint(1, 50, shape, generator=generator) * attention,
        attention_mask=attention,
        response_mask=response,
        columns=columns,
        rows_per_unit=rows_per_unit,
        sample_ids=tuple(str(row) for row in range(rows)),
    )
    return batch, outputs


def sample_outputs(outputs: Mapping[str, Tensor], batch: Batch, fields: Sequence[str]) -> ModelOutputs:
    """The outputs of a batch's rows, cut or padded to its width and zero where masked, as an engine gives them."""
    width = batch.token_ids.shape[1]
    found: dict[str, Tensor] = {}
    for name in fields:
        value = outputs[name][batch["row_index"]]
        if value.dim() == 2:
            value = torch.nn.functional.pad(value, (0, max(0, width - value.shape[1])))[:, :width]
            value = value.masked_fill(~batch.response_mask, 0)
        found[name] = value
    return ModelOutputs(**found)


def widened(batch: Batch, extra: int) -> Batch:
    """The batch with `extra` positions of padding, in which every column is NaN."""

    def widen(tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:
            return tensor
        filler = math.nan if tensor.is_floating_point() else 0
        return torch.nn.functional.pad(tensor, (0, extra), value=filler)

    return replace(
        batch,
        token_ids=widen(batch.token_ids),
        attention_mask=widen(batch.attention_mask),
        response_mask=widen(batch.response_mask),
        columns={name: widen(column) for name, column in batch.columns.items()},
    )


def poisoned(batch: Batch) -> Batch:
    """The batch with NaN wherever a column lies outside the response mask."""

    def poison(column: Tensor) -> Tensor:
        if column.dim() < 2 or not column.is_floating_point():
            return column
        return column.masked_fill(~batch.response_mask, math.nan)

    return replace(batch, columns={name: poison(column) for name, column in batch.columns.items()})


def in_float32(batch: Batch) -> Batch:
    """The batch with its columns in float32."""
    columns = {name: c.float() if c.is_floating_point() else c for name, c in batch.columns.items()}
    return replace(batch, columns=columns)
