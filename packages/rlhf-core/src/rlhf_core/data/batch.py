"""Rows of tokens with named per-token and per-row columns, which engines and algorithms exchange; masked sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from rlhf_core.data.images import RowImages, loaded_images
from rlhf_core.data.pickled import reduced
from rlhf_core.data.trajectory import Trajectory

RUN_TOGETHER = "run_together"
"""Column [rows] of whole numbers: rows of one number run through a model together, and with no others.

Rounding depends on the sizes of what is multiplied, so a row's last bits depend on the rows beside it. With this
column a row's numbers are the same bits whatever else is in the batch, in whatever order.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """A right-padded batch. Every per-token array is aligned with `token_ids`; position 0 is never trained.

    >>> b = Batch(token_ids=torch.tensor([[5, 6, 7], [5, 8, 0]]),
    ...           attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
    ...           response_mask=torch.tensor([[0, 0, 1], [0, 1, 0]]).bool())
    >>> b = b.with_columns(advantages=torch.ones(2, 3))
    >>> b["advantages"].shape, b.lengths.tolist(), b.select([1]).rows
    (torch.Size([2, 3]), [3, 2], 1)
    """

    token_ids: Int[Tensor, "rows length"]
    attention_mask: Bool[Tensor, "rows length"]
    """True where there is a token, False in the padding on the right."""
    response_mask: Bool[Tensor, "rows length"]
    """True where a token counts for the loss."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Named tensors of shape [rows], [rows, length] or [rows, length, k]: `advantages`, `old_log_probs`, ..."""
    temperature: float = 1.0
    """Log-probs are those of softmax(logits / temperature)."""
    rows_per_unit: int = 1
    """Consecutive rows that belong together (2 for preference pairs); they are never split apart."""
    sample_ids: tuple[str, ...] = ()
    """One name per row for reports; empty if the rows are anonymous."""
    images: tuple[RowImages | None, ...] = ()
    """What the model is shown of each row, None for a row without images; empty if no row has any."""

    def __post_init__(self) -> None:
        shape = tuple(self.token_ids.shape)
        if len(shape) != 2:
            raise ValueError(f"token_ids must be [rows, length], got shape {shape}")
        for name, tensor in {
            "attention_mask": self.attention_mask,
            "response_mask": self.response_mask,
            **self.columns,
        }.items():
            if tuple(tensor.shape) != shape[:1] and tuple(tensor.shape[:2]) != shape:
                raise ValueError(
                    f"column {name!r} must be [{shape[0]}] or [{shape[0]}, {shape[1]}, ...] like token_ids, "
                    f"got {tuple(tensor.shape)}"
                )
        if self.rows_per_unit < 1 or shape[0] % self.rows_per_unit:
            raise ValueError(f"{shape[0]} rows cannot be cut into units of {self.rows_per_unit}")
        if self.sample_ids and len(self.sample_ids) != shape[0]:
            raise ValueError(f"{len(self.sample_ids)} sample ids for {shape[0]} rows")
        if self.images and len(self.images) != shape[0]:
            raise ValueError(f"images of {len(self.images)} rows for {shape[0]} rows")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self, protocol)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.token_ids.shape[0]

    @property
    def units(self) -> int:
        """Number of indivisible groups of `rows_per_unit` rows."""
        return self.rows // self.rows_per_unit

    @property
    def lengths(self) -> Int[Tensor, " rows"]:
        """Tokens per row, padding left out."""
        return counted(self.attention_mask)

    @property
    def unit_lengths(self) -> list[int]:
        """Tokens per unit, padding left out."""
        return self.lengths.view(-1, self.rows_per_unit).sum(dim=1).tolist()

    @property
    def tokens(self) -> int:
        """Tokens in the batch, padding left out."""
        return int(self.attention_mask.count_nonzero())

    @property
    def response_tokens(self) -> int:
        """Tokens that count for the loss."""
        return int(self.response_mask.count_nonzero())

    def __getitem__(self, column: str) -> Tensor:
        try:
            return self.columns[column]
        except KeyError:
            known = ", ".join(sorted(self.columns)) or "none"
            raise KeyError(f"the batch has no column {column!r} (columns: {known})") from None

    def __contains__(self, column: object) -> bool:
        return column in self.columns

    def with_columns(self, **columns: Tensor) -> Batch:
        """A batch with these columns added or replaced; tensors are shared, not copied."""
        return replace(self, columns={**self.columns, **columns})

    def select(self, rows: Sequence[int]) -> Batch:
        """The given rows in the given order, trimmed to their longest row."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.token_ids.device)
        attention_mask = self.attention_mask.index_select(0, index)
        width = max(1, int(counted(attention_mask).max())) if len(rows) else self.token_ids.shape[1]

        def cut(tensor: Tensor) -> Tensor:
            return (tensor[:, :width] if tensor.dim() > 1 else tensor).index_select(0, index)

        return replace(
            self,
            token_ids=cut(self.token_ids),
            attention_mask=attention_mask[:, :width],
            response_mask=cut(self.response_mask),
            columns={name: cut(tensor) for name, tensor in self.columns.items()},
            sample_ids=tuple(self.sample_ids[row] for row in rows) if self.sample_ids else (),
            images=images_of(self.images, rows),
        )

    def select_units(self, units: Sequence[int]) -> Batch:
        """Like `select`, by unit instead of by row."""
        size = self.rows_per_unit
        return self.select([unit * size + offset for unit in units for offset in range(size)])

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device; its images stay in host memory until the model runs their rows."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            response_mask=self.response_mask.to(device),
            columns={name: tensor.to(device) for name, tensor in self.columns.items()},
        )


def images_of(images: tuple[RowImages | None, ...], rows: Sequence[int]) -> tuple[RowImages | None, ...]:
    """Those of some rows; empty if none of these has any."""
    picked = tuple(images[row] for row in rows) if images else ()
    return picked if any(one is not None for one in picked) else ()


def counted(mask: Bool[Tensor, "rows length"]) -> Int[Tensor, " rows"]:
    """How many in each row are True."""
    if mask.device.type != "cpu":
        return mask.count_nonzero(dim=1)
    return torch.from_numpy(np.count_nonzero(mask.numpy(), axis=1))  # a tenth of the time of torch's


def pad_rows(rows: Sequence[Sequence[Any]], *, value: Any, dtype: torch.dtype) -> Tensor:
    """Stack sequences of unequal length into [rows, longest], padded on the right with `value`."""
    padded = torch.full((len(rows), max(map(len, rows), default=0)), value, dtype=dtype)
    for place, row in zip(padded.numpy(), rows, strict=True):
        place[: len(row)] = row
    return padded


def collate(
    trajectories: Iterable[Trajectory], *, pad_token_id: int = 0, temperature: float | None = None
) -> Batch:
    """Trajectories as a batch with the column `rollout_log_probs` ([rows, length], float32).

    There is also a column `rewards` ([rows, length], float32) if an environment gave any trajectory some.

    The batch takes the temperature of the samples. Samples of different temperatures in one batch are an
    error: their log-probs would mean different things.
    """
    items = list(trajectories)
    if not items:
        raise ValueError("cannot collate an empty list of trajectories")
    temperatures = {item.meaning.temperature for item in items}
    if temperature is None:
        if len(temperatures) > 1:
            raise ValueError(f"samples drawn at different temperatures in one batch: {sorted(temperatures)}")
        temperature = temperatures.pop()
    log_probs = pad_rows([t.rollout_log_probs for t in items], value=0.0, dtype=torch.float32)
    columns = {"rollout_log_probs": log_probs}
    if any(t.rewards for t in items):
        columns["rewards"] = pad_rows([t.rewards for t in items], value=0.0, dtype=torch.float32)
        if columns["rewards"].shape != log_probs.shape:  # those of the longest rows are empty
            columns["rewards"] = pad(columns["rewards"], (0, log_probs.shape[1] - columns["rewards"].shape[1]))
    lengths = torch.tensor([len(t.token_ids) for t in items])
    return Batch(
        token_ids=pad_rows([t.token_ids for t in items], value=pad_token_id, dtype=torch.long),
        attention_mask=torch.arange(log_probs.shape[1]) < lengths[:, None],
        response_mask=pad_rows([t.response_mask for t in items], value=False, dtype=torch.bool),
        columns=columns,
        temperature=temperature,
        sample_ids=tuple(t.sample_id for t in items),
        images=loaded_images(t.shown for t in items),
    )


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches in one, padded to the longest; they must have the same columns.

    >>> short = Batch(token_ids=torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 2).bool(),
    ...               response_mask=torch.tensor([[0, 1]]).bool())
    >>> long = Batch(token_ids=torch.tensor([[5, 7, 8]]), attention_mask=torch.ones(1, 3).bool(),
    ...              response_mask=torch.tensor([[0, 1, 1]]).bool())
    >>> concatenate([short, long]).token_ids.tolist(), concatenate([short, long]).lengths.tolist()
    ([[5, 6, 0], [5, 7, 8]], [2, 3])

    Raises:
        ValueError: there is no batch, or they differ in columns, temperature or rows per unit.
    """
    if not batches:
        raise ValueError("there is no batch to concatenate")
    first = batches[0]
    kinds = {(tuple(sorted(batch.columns)), batch.temperature, batch.rows_per_unit) for batch in batches}
    if len(kinds) > 1:
        raise ValueError(f"batches differ in columns, temperature or rows per unit: {sorted(kinds)}")
    width = max(batch.token_ids.shape[1] for batch in batches)

    def joined(tensors: list[Tensor]) -> Tensor:
        if tensors[0].dim() == 1:
            return torch.cat(tensors)
        wide = tensors[0].new_zeros(sum(map(len, tensors)), width, *tensors[0].shape[2:])
        for part, tensor in zip(wide.split([len(tensor) for tensor in tensors]), tensors, strict=True):
            part[:, : tensor.shape[1]] = tensor
        return wide

    names = [batch.sample_ids for batch in batches]
    return replace(
        first,
        token_ids=joined([batch.token_ids for batch in batches]),
        attention_mask=joined([batch.attention_mask for batch in batches]),
        response_mask=joined([batch.response_mask for batch in batches]),
        columns={name: joined([batch[name] for batch in batches]) for name in first.columns},
        sample_ids=tuple(name for part in names for name in part) if all(names) else (),
        images=all_images([(batch.images, batch.rows) for batch in batches]),
    )


def all_images(batches: Sequence[tuple[tuple[RowImages | None, ...], int]]) -> tuple[RowImages | None, ...]:
    """The images of the rows of several batches, of which these are the images and the number of rows."""
    if not any(images for images, _ in batches):
        return ()
    return tuple(one for images, rows in batches for one in images or (None,) * rows)


def masked_sum(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Sum where `mask` is True, 0 where nothing is. Other positions may hold anything, NaN included."""
    kept = values.masked_fill(~mask, 0)
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Mean where `mask` is True; 0 where nothing is."""
    count = mask.count_nonzero() if dim is None else mask.count_nonzero(dim=dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)
