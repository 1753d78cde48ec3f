"""Batches as flat tensors without padding, for files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from rlhf_core import Batch, RaggedBatch
from torch import Tensor

_LENGTHS = "lengths"
_TOKEN, _ROW = "token/", "row/"


def pack_batch(batch: RaggedBatch) -> dict[str, Tensor]:
    """The numbers of a batch: `lengths` [rows], `token/<column>` [tokens, ...] joined over all rows, `row/<column>`
    [rows]. Its names and its temperature are not among them."""
    packed = {_LENGTHS: torch.tensor(batch.lengths, dtype=torch.int64)}
    packed |= {f"{_TOKEN}{name}": torch.from_numpy(column.joined()) for name, column in batch.per_token.items()}
    packed |= {f"{_ROW}{name}": column.clone().contiguous() for name, column in batch.per_row.items()}
    return packed


def unpack_batch(packed: Mapping[str, Tensor], *, temperature: float, sample_ids: Sequence[str]) -> Batch:
    """Inverse of `pack_batch`; the padding is 0."""
    lengths = packed[_LENGTHS]
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    columns: dict[str, Tensor] = {}
    for name, values in packed.items():
        if name.startswith(_ROW):
            columns[name.removeprefix(_ROW)] = values
        elif name.startswith(_TOKEN):
            whole = values.new_zeros(*mask.shape, *values.shape[1:])
            whole[mask] = values
            columns[name.removeprefix(_TOKEN)] = whole
    return Batch(
        token_ids=columns.pop("token_ids").long(),
        attention_mask=mask,
        response_mask=columns.pop("response_mask"),
        columns=columns,
        temperature=temperature,
        sample_ids=tuple(sample_ids),
    )
