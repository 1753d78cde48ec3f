"""Rows of tokens without padding: what holds a step's samples where nothing is computed from their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_core.data.batch import Batch, all_images, images_of
from rlhf_core.data.images import RowImages, loaded_images
from rlhf_core.data.packed import Packed, Part, Run, fill, length_of, memory_of, runs_of, whole_of
from rlhf_core.data.pickled import reduced
from rlhf_core.data.trajectory import Trajectory

_TOKENS, _MASK = "token_ids", "response_mask"


class RaggedColumn:
    """Numbers for each token of rows of unequal length: parts of each row, as the rows of `Packed` sequences are.

    Nothing is copied: rows are views of whatever memory they came in. A pickle of protocol 5 has each array once,
    as a buffer out of band, also where rows share it.
    """

    __slots__ = ("kind", "rows", "tail")

    def __init__(self, rows: Sequence[tuple[Part, ...]], kind: np.dtype[Any], tail: tuple[int, ...] = ()) -> None:
        self.rows = rows
        """The parts of each row: arrays [tokens, *tail] of this kind, and runs."""
        self.kind = kind
        """Of the numbers."""
        self.tail = tail
        """Shape of what a token has; () for one number."""

    @classmethod
    def of_packed(cls, rows: Sequence[Packed[Any]]) -> RaggedColumn:
        """Sequences of one kind, row by row."""
        return cls([row.parts for row in rows], rows[0].kind)

    @classmethod
    def cut(cls, padded: Tensor, lengths: Sequence[int]) -> RaggedColumn:
        """The rows of a tensor [rows, length, *tail] without their padding, in the memory of the tensor."""
        array = padded.detach().contiguous().numpy()
        return cls(
            [(row[:length],) for row, length in zip(array, lengths, strict=True)], array.dtype, array.shape[2:]
        )

    @classmethod
    def split(cls, joined: NDArray[Any], lengths: Sequence[int]) -> RaggedColumn:
        """The rows of an array [tokens, *tail] of all of them, in the memory of the array."""
        rows: list[tuple[Part, ...]] = []
        begin = 0
        for length in lengths:
            rows.append((joined[begin : begin + length],))
            begin += length
        return cls(rows, joined.dtype, joined.shape[1:])

    def padded(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, width, *tail], with 0 behind the end of each row."""
        whole = torch.zeros((len(self.rows), width, *self.tail), dtype=dtype or _torch_type(self.kind))
        for target, parts in zip(whole.numpy(), self.rows, strict=True):
            fill(target, parts)
        return whole

    def joined(self) -> NDArray[Any]:
        """[tokens, *tail] of all rows, one after the other."""
        return whole_of([part for row in self.rows for part in row], self.kind, self.tail)

    def select(self, rows: Iterable[int]) -> RaggedColumn:
        """Some of the rows, in this order."""
        return RaggedColumn([self.rows[row] for row in rows], self.kind, self.tail)

    def followed_by(self, other: RaggedColumn | None, lengths: Sequence[int]) -> RaggedColumn:
        """The rows of both in the kind of these; where there is no other, rows of these lengths that hold 0."""
        if other is not None:
            if other.tail != self.tail:
                raise ValueError(f"columns have {self.tail} and {other.tail} numbers for each token")
            more = [tuple(_of_kind(part, self.kind) for part in row) for row in other.rows]
        elif self.tail:
            more = [(np.zeros((length, *self.tail), self.kind),) for length in lengths]
        else:
            more = [(Run(self.kind.type(0).item(), length),) for length in lengths]
        return RaggedColumn([*self.rows, *more], self.kind, self.tail)

    def compressed(self) -> RaggedColumn:
        """The same numbers with runs in place of the arrays of rows in which numbers repeat."""
        if self.tail:
            return self
        rows = [parts if len(parts) != 1 or isinstance(parts[0], Run) else runs_of(parts[0]) for parts in self.rows]
        return RaggedColumn(rows, self.kind)

    def rows_not_finite(self, mask: RaggedColumn) -> int:
        """How many rows have a number that is not finite where the mask is True."""
        found = 0
        for parts, counted in zip(self.rows, mask.rows, strict=True):
            if all(np.isfinite(part.value if isinstance(part, Run) else part).all() for part in parts):
                continue
            bad = ~np.isfinite(whole_of(parts, self.kind, self.tail))
            found += bool((bad.reshape(len(bad), -1).any(axis=1) & whole_of(counted, mask.kind)).any())
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        arrays: list[Any] = []
        places: dict[int, int] = {}
        written: list[tuple[Any, ...]] = []
        for parts in self.rows:
            row: list[Any] = []
            for part in parts:
                if isinstance(part, Run):
                    row += part
                    continue
                place = places.get(id(part))
                if place is None:
                    place = places[id(part)] = len(arrays)
                    arrays.append(memory_of(part, protocol))
                row += (None, place)
            written.append(tuple(row))
        return _read, (self.kind.str, self.tail, arrays, written)


def _read(
    kind: str, tail: tuple[int, ...], memories: Sequence[Any], written: Sequence[tuple[Any, ...]]
) -> RaggedColumn:
    arrays = [np.frombuffer(memory, dtype=kind).reshape(-1, *tail) for memory in memories]
    rows = [
        tuple(arrays[b] if a is None else Run(a, b) for a, b in zip(row[::2], row[1::2], strict=True))
        for row in written
    ]
    return RaggedColumn(rows, np.dtype(kind), tail)


def _of_kind(part: Part, kind: np.dtype[Any]) -> Part:
    if isinstance(part, Run):
        return Run(kind.type(part.value).item(), part.count)
    return part if part.dtype == kind else part.astype(kind)


def _torch_type(kind: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=kind)).dtype


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RaggedBatch:
    """What a `Batch` holds, row by row in the memory that it came in: to be dealt out, sent and kept.

    Where a model or an algorithm is to see it, `padded` makes a `Batch` of it. It costs no time for each token, and
    no memory beside that of its rows.
    """

    lengths: tuple[int, ...]
    """Tokens of each row."""
    per_token: Mapping[str, RaggedColumn]
    """Among them `token_ids` (32 bits) and `response_mask`."""
    per_row: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of shape [rows]."""
    temperature: float = 1.0
    """See Batch."""
    rows_per_unit: int = 1
    """See Batch."""
    sample_ids: tuple[str, ...] = ()
    """See Batch."""
    images: tuple[RowImages | None, ...] = ()
    """See Batch."""

    @classmethod
    def of(cls, batch: Batch | RaggedBatch) -> RaggedBatch:
        """A batch without its padding."""
        if isinstance(batch, RaggedBatch):
            return batch
        lengths = tuple(batch.lengths.tolist())
        columns = {_TOKENS: batch.token_ids, _MASK: batch.response_mask, **batch.columns}
        return cls(
            lengths=lengths,
            per_token={name: RaggedColumn.cut(one, lengths) for name, one in columns.items() if one.dim() > 1},
            per_row={name: one for name, one in columns.items() if one.dim() == 1},
            temperature=batch.temperature,
            rows_per_unit=batch.rows_per_unit,
            sample_ids=batch.sample_ids,
            images=batch.images,
        )

    @classmethod
    def of_trajectories(cls, trajectories: Iterable[Trajectory]) -> RaggedBatch:
        """Trajectories as rows, in their own memory: what `collate` makes, without padding.

        Raises:
            ValueError: there is none, or they were sampled at different temperatures.
        """
        items = list(trajectories)
        if not items:
            raise ValueError("cannot make a batch of an empty list of trajectories")
        # Samples of one request share their meaning.
        meanings = {id(item.meaning): item.meaning for item in items}.values()
        temperatures = {meaning.temperature for meaning in meanings}
        if len(temperatures) > 1:
            raise ValueError(f"samples drawn at different temperatures in one batch: {sorted(temperatures)}")
        lengths = tuple(len(item.token_ids) for item in items)
        per_token = {
            name: RaggedColumn.of_packed([getattr(item, name) for item in items])
            for name in (_TOKENS, _MASK, "rollout_log_probs")
        }
        if any(item.rewards for item in items):
            # Rewards are doubles, the columns of a batch floats; where no sample was rewarded there are none.
            rows: list[tuple[Part, ...]] = [
                (np.asarray(item.rewards).astype(np.float32) if item.rewards else Run(0.0, length),)
                for item, length in zip(items, lengths, strict=True)
            ]
            per_token["rewards"] = RaggedColumn(rows, np.dtype(np.float32)).compressed()
        return cls(
            lengths=lengths,
            per_token=per_token,
            temperature=temperatures.pop(),
            sample_ids=tuple(item.sample_id for item in items),
            images=loaded_images(item.shown for item in items),
        )

    def __post_init__(self) -> None:
        for name, column in {**self.per_token, **self.per_row}.items():
            found = len(column.rows if isinstance(column, RaggedColumn) else column)
            if found != self.rows:
                raise ValueError(f"column {name!r} has {found} rows, the batch {self.rows}")
        if self.images and len(self.images) != self.rows:
            raise ValueError(f"images of {len(self.images)} rows for {self.rows} rows")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self, protocol)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def units(self) -> int:
        """Number of indivisible groups of `rows_per_unit` rows."""
        return self.rows // self.rows_per_unit

    @property
    def unit_lengths(self) -> list[int]:
        """Tokens per unit."""
        size = self.rows_per_unit
        return [sum(self.lengths[start : start + size]) for start in range(0, self.rows, size)]

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""
        return sum(self.lengths)

    @property
    def response_tokens(self) -> int:
        """Tokens that count for the loss."""
        parts = (part for row in self.per_token[_MASK].rows for part in row)
        return sum(
            int(part.value) * part.count if isinstance(part, Run) else int(np.count_nonzero(part)) for part in parts
        )

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths, default=0)

    def __contains__(self, column: object) -> bool:
        return column in self.per_row or (column in self.per_token and column not in (_TOKENS, _MASK))

    def __getitem__(self, column: str) -> Tensor:
        """A column as a `Batch` has it, which for one per token is a copy with padding."""
        if column in self.per_row:
            return self.per_row[column]
        if column not in self:
            known = ", ".join(sorted({*self.per_token, *self.per_row} - {_TOKENS, _MASK})) or "none"
            raise KeyError(f"the batch has no column {column!r} (columns: {known})")
        return self.per_token[column].padded(self.width)

    def with_columns(self, **columns: RaggedColumn | Tensor) -> RaggedBatch:
        """A batch with these columns added or replaced; one [rows, length, ...] with padding loses it."""
        per_row = {name: one for name, one in columns.items() if isinstance(one, Tensor) and one.dim() == 1}
        per_token = {
            name: RaggedColumn.cut(one, self.lengths) if isinstance(one, Tensor) else one
            for name, one in columns.items()
            if name not in per_row
        }
        return replace(self, per_token={**self.per_token, **per_token}, per_row={**self.per_row, **per_row})

    def select(self, rows: Sequence[int]) -> RaggedBatch:
        """The given rows in the given order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return replace(
            self,
            lengths=tuple(self.lengths[row] for row in rows),
            per_token={name: column.select(rows) for name, column in self.per_token.items()},
            per_row={name: column.index_select(0, index) for name, column in self.per_row.items()},
            sample_ids=tuple(self.sample_ids[row] for row in rows) if self.sample_ids else (),
            images=images_of(self.images, rows),
        )

    def select_units(self, units: Sequence[int]) -> RaggedBatch:
        """Like `select`, by unit instead of by row."""
        size = self.rows_per_unit
        return self.select([unit * size + offset for unit in units for offset in range(size)])

    def followed_by(self, other: RaggedBatch) -> RaggedBatch:
        """The rows of this batch, then those of another, with the columns of this one.

        What the other has no column for is 0 in its rows; columns that it alone has are left out. The temperature
        is that of this batch.

        Raises:
            ValueError: they differ in rows per unit, or in what a column has for each token.
        """
        if self.rows_per_unit != other.rows_per_unit:
            raise ValueError(f"units of {self.rows_per_unit} and of {other.rows_per_unit} rows in one batch")
        per_row = {
            name: torch.cat(
                [one, other.per_row[name].to(one) if name in other.per_row else one.new_zeros(other.rows)]
            )
            for name, one in self.per_row.items()
        }
        return replace(
            self,
            lengths=(*self.lengths, *other.lengths),
            per_token={
                name: one.followed_by(other.per_token.get(name), other.lengths)
                for name, one in self.per_token.items()
            },
            per_row=per_row,
            sample_ids=(*self.sample_ids, *other.sample_ids) if self.sample_ids and other.sample_ids else (),
            images=all_images([(self.images, self.rows), (other.images, other.rows)]),
        )

    def of_text(self) -> RaggedBatch:
        """The batch without its images, for work that no model does."""
        return replace(self, images=()) if self.images else self

    def only(self, per_token: Iterable[str]) -> RaggedBatch:
        """The batch with these columns per token alone, and `token_ids` and `response_mask`."""
        kept = {_TOKENS, _MASK, *per_token}
        return replace(self, per_token={name: one for name, one in self.per_token.items() if name in kept})

    def prompt_parts(self) -> Iterator[tuple[int, tuple[Part, ...]]]:
        """Of each row, how many tokens stand before the first that counts (all where none does), and its tokens."""
        masks, tokens = self.per_token[_MASK].rows, self.per_token[_TOKENS].rows
        for length, mask, ids in zip(self.lengths, masks, tokens, strict=True):
            yield _first_counted(mask, length), ids

    def padded(self, width: int | None = None) -> Batch:
        """The same with padding up to the longest row, or to this width."""
        width = max(1, self.width) if width is None else width
        columns = {
            name: column.padded(width, torch.long if name == _TOKENS else None)
            for name, column in self.per_token.items()
        }
        return Batch(
            token_ids=columns.pop(_TOKENS),
            attention_mask=torch.arange(width) < torch.tensor(self.lengths, dtype=torch.long)[:, None],
            response_mask=columns.pop(_MASK),
            columns={**columns, **self.per_row},
            temperature=self.temperature,
            rows_per_unit=self.rows_per_unit,
            sample_ids=self.sample_ids,
            images=self.images,
        )


def _first_counted(mask: tuple[Part, ...], length: int) -> int:
    begin = 0
    for part in mask:
        if isinstance(part, Run):
            if part.value:
                return begin
        elif part.any():
            return begin + int(part.argmax())
        begin += length_of(part)
    return length
