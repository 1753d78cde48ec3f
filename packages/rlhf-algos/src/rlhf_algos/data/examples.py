"""Encoded examples: the rows that stay together, and how a list of them becomes a Batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from rlhf_core import Batch, DataError, RowImages, pad_rows
from torch import Tensor

from rlhf_algos.data.encoding import Encoder, TokenRow
from rlhf_algos.data.image_encoding import ShownImages
from rlhf_algos.data.lengths import LengthSection
from rlhf_algos.data.sources import Row

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One training example: a sequence, or a pair of them."""

    name: str
    """Where it came from, for reports."""
    rows: tuple[TokenRow, ...]
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Column name -> one value per row."""
    token_columns: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """Column name -> one value per token of each row."""
    counted_tensors: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """Column name -> per row a tensor [counted tokens, k]."""
    partner: TokenRow | None = None
    """Another example's response to this one's prompt, for estimates of the KL divergence."""

    @property
    def row_name(self) -> str:
        """The row of the data it was made from; a row may give several examples."""
        return self.name.removesuffix(" chosen").removesuffix(" rejected")

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingReport:
    """What became of the rows of a dataset."""

    rows: int
    """Rows read."""
    examples: int
    """Examples made and kept."""
    truncated: int = 0
    """Examples of which an end was cut off."""
    dropped: int = 0
    """Examples left out because they were too long."""
    equal: int = 0
    """Rows left out because their answers, or the scores of these, are equal, so that they prefer nothing."""

    def __str__(self) -> str:
        text = f"{self.rows} rows, {self.examples} examples"
        text += f", {self.truncated} truncated" if self.truncated else ""
        text += f", {self.dropped} dropped as too long" if self.dropped else ""
        return text + (f", {self.equal} left out with equal answers" if self.equal else "")


Encode = Callable[[Row, Encoder], Iterable[Example]]
"""Makes the examples of a row; none of one whose answers, or their scores, are equal."""


def encode_rows(
    rows: Sequence[Row], encode: Encode, encoder: Encoder, lengths: LengthSection
) -> tuple[list[Example], EncodingReport]:
    """Encode all rows and bring them under the length limits.

    Raises:
        DataError: a row that cannot be encoded, a sequence that is too long where the section says error, or
            nothing left.
    """
    kept: list[Example] = []
    equal: list[str] = []
    truncated = dropped = 0
    for row in rows:
        made = list(encode(row, encoder))
        if not made:
            equal.append(row.place)
        for example in made:
            _check_places(example, encoder)
            fitted = fit(example, lengths)
            if fitted is None:
                dropped += 1
                continue
            truncated += fitted is not example
            kept.append(fitted)
    if equal:
        few = ", ".join(equal[:3]) + (", ..." if len(equal) > 3 else "")
        _log.warning(
            "rows left out because chosen and rejected, or their scores, are equal: %d (%s)", len(equal), few
        )
    if not kept and equal:
        raise DataError(
            f"{rows[0].source}: chosen and rejected are equal, or have equal scores, in {len(equal)} of "
            f"{len(rows)} rows and nothing is left to learn from; look at how the pairs were made"
        )
    if not kept:
        raise DataError(
            f"all {len(rows)} rows of {rows[0].source} were dropped as too long; raise lengths.max_length, now "
            f"{lengths.longest}"
        )
    report = EncodingReport(
        rows=len(rows), examples=len(kept), truncated=truncated, dropped=dropped, equal=len(equal)
    )
    return kept, report


def fit(example: Example, lengths: LengthSection) -> Example | None:
    """The example within the lengths, cut if need be; None if it is to be left out; itself if it fits.

    Raises:
        DataError: it is too long and the section says error.
    """
    longest = max(len(row.token_ids) for row in example.rows)
    prompt = max(row.prompt_length for row in example.rows)
    most = lengths.max_prompt_tokens
    if most is not None and prompt > most:
        if lengths.long_prompts == "keep_end":
            return fit(_cut(example, slice(prompt - most, None)), lengths)
        if lengths.long_prompts == "drop":
            return None
        raise DataError(
            f"{example.name}: the prompt has {prompt} tokens, lengths.max_prompt_tokens is {most}; raise it, or "
            "write lengths.long_prompts: drop (or keep_end)"
        )
    if longest <= lengths.longest:
        return example
    if prompt >= lengths.longest:
        if lengths.long_prompts == "error":
            raise DataError(
                f"{example.name}: the prompt has {prompt} tokens and leaves no room for an answer in "
                f"lengths.max_length={lengths.longest}; raise it, or write lengths.long_prompts: drop (or keep_end)"
            )
        return None if lengths.long_prompts == "drop" else _cut(example, slice(-lengths.longest, None))
    if lengths.long_rows == "error":
        raise DataError(
            f"{example.name}: {longest} tokens are more than lengths.max_length={lengths.longest}; raise it, or "
            "write lengths.long_rows: truncate (or drop)"
        )
    return None if lengths.long_rows == "drop" else _cut(example, slice(None, lengths.longest))


def _check_places(example: Example, encoder: Encoder) -> None:
    """Refuse text that holds tokens of images without any image: the model would look for one there."""
    if encoder.processor is None:
        return
    place = encoder.tokenizer.convert_tokens_to_ids(encoder.processor.image_token)
    tokens = {place, *encoder.processor.image_token_ids}
    for row in example.rows:
        if row.images is None and not tokens.isdisjoint(row.token_ids):
            raise DataError(
                f"{example.name}: the text has a place for an image, and the row has no column images (or image)"
            )


def _cut(example: Example, part: slice) -> Example:
    def cut(row: TokenRow) -> TokenRow:
        mask = row.response_mask[part]
        if row.images is not None:
            inside = sum(token in row.images.token_ids for token in row.token_ids)
            if sum(token in row.images.token_ids for token in row.token_ids[part]) < inside:
                raise DataError(
                    f"{example.name}: {len(row.token_ids)} tokens are too many, and to cut them would cut through "
                    "an image; raise lengths.max_length, or write lengths.long_rows and long_prompts: drop"
                )
        # The first token of a sequence is never predicted, so it cannot count.
        return replace(row, token_ids=row.token_ids[part], response_mask=(False, *mask[1:]))

    def still_counted(tensor: Tensor, row: TokenRow) -> Tensor:
        places = range(len(row.token_ids))[part]
        counted = [place for place, counts in enumerate(row.response_mask) if counts]
        return tensor[[place in places[1:] for place in counted]]

    return replace(
        example,
        rows=tuple(cut(row) for row in example.rows),
        token_columns={
            name: tuple(values[part] for values in rows) for name, rows in example.token_columns.items()
        },
        counted_tensors={
            name: tuple(still_counted(t, r) for t, r in zip(tensors, example.rows, strict=True))
            for name, tensors in example.counted_tensors.items()
        },
    )


def collate_examples(
    examples: Sequence[Example], *, pad_token_id: int, columns: Mapping[str, Tensor] | None = None
) -> Batch:
    """Examples as one batch whose units are the examples; `columns` [rows] are added as they are."""
    rows = [row for example in examples for row in example.rows]
    made: dict[str, Tensor] = {}
    for name in examples[0].columns:
        made[name] = torch.tensor([value for e in examples for value in e.columns[name]], dtype=torch.float32)
    for name in examples[0].token_columns:
        made[name] = pad_rows(
            [values for e in examples for values in e.token_columns[name]], value=0.0, dtype=torch.float32
        )
    per_example = len(examples[0].rows)
    response_mask = pad_rows([row.response_mask for row in rows], value=False, dtype=torch.bool)
    for name in examples[0].counted_tensors:
        values = torch.cat([tensor for e in examples for tensor in e.counted_tensors[name]])
        placed = values.new_zeros(*response_mask.shape, values.shape[-1])
        placed[response_mask] = values
        made[name] = placed
    return Batch(
        token_ids=pad_rows([row.token_ids for row in rows], value=pad_token_id, dtype=torch.long),
        attention_mask=pad_rows([[True] * len(row.token_ids) for row in rows], value=False, dtype=torch.bool),
        response_mask=response_mask,
        columns={**made, **(columns or {})},
        rows_per_unit=per_example,
        sample_ids=tuple(e.name for e in examples for _ in e.rows),
        images=_loaded([row.images for row in rows]),
    )


def _loaded(shown: Sequence[ShownImages | None]) -> tuple[RowImages | None, ...]:
    """What the model is given of each row's images; rows that show the same ones share it."""
    if not any(shown):
        return ()
    made = {id(one): one.load() for one in {id(one): one for one in shown if one is not None}.values()}
    return tuple(None if one is None else made[id(one)] for one in shown)
