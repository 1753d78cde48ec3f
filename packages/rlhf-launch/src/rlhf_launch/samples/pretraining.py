"""The text that a policy is trained on beside its samples (PPO-ptx): encoded once, dealt out by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from rlhf_algos import (
    DataSource,
    Encoder,
    EncodingOptions,
    EncodingReport,
    Example,
    LengthSection,
    encode_rows,
    mixing_weights,
    read_rows,
    supervised_examples,
)
from rlhf_core import RaggedBatch, RaggedColumn

from rlhf_launch.config.data import OnlineDataSection
from rlhf_launch.samples.prompts import PromptStream


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingText:
    """The rows of `data.pretrain` as tokens."""

    examples: Sequence[Example]
    """One dataset after the other."""
    sizes: tuple[int, ...]
    """Examples of each dataset."""
    weights: tuple[float, ...]
    """How probable a draw from each is, relative to the others."""
    reports: Sequence[EncodingReport]
    """What became of each dataset's rows."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.reports))


def load_pretraining(
    data: OnlineDataSection, tokenizer: Any, lengths: LengthSection, *, max_length: int
) -> PretrainingText | None:
    """Read and encode `data.pretrain`; None without it.

    Rows are `text`, `prompt` with an answer, or `messages`, as for SFT: all tokens of a text count, of the others
    those of the answers.

    Args:
        data: names the datasets.
        tokenizer: the policy's.
        lengths: what becomes of rows that are too long.
        max_length: tokens of the longest sample, for which the engines have room: no row is longer.

    Raises:
        DataError: a row that cannot be encoded, or nothing left.
    """
    if not data.pretrain:
        return None
    options = EncodingOptions(
        prompt_template=data.prompt_template, chat=data.chat, system_prompt=data.system_prompt
    )
    encoder = Encoder(tokenizer, options)
    lengths = replace(lengths, max_length=max_length, max_prompt_tokens=None)
    made = [_encode(source, encoder, lengths) for source in data.pretrain]
    sizes = tuple(len(examples) for examples, _ in made)
    return PretrainingText(
        examples=[example for examples, _ in made for example in examples],
        sizes=sizes,
        weights=mixing_weights(data.pretrain, sizes),
        reports=[report for _, report in made],
    )


def _encode(source: DataSource, encoder: Encoder, lengths: LengthSection) -> tuple[list[Example], EncodingReport]:
    return encode_rows(read_rows(source), supervised_examples, encoder, lengths)


class PretrainingStream:
    """Passes over the text without end, each in an order of its own; so many rows for every optimizer step.

    What a step of the loop is trained on follows from the seed and the number of the steps before it, so a resumed
    run has nothing else to remember.
    """

    def __init__(
        self,
        text: PretrainingText,
        *,
        seed: int,
        rows: int,
        updates: int,
        shuffle: bool = True,
        mixed: bool = False,
    ) -> None:
        """A stream of the rows.

        Args:
            text: what it goes through.
            seed: of the orders.
            rows: for each optimizer step of the policy.
            updates: optimizer steps in a step of the loop.
            shuffle: False takes them in the order of the data.
            mixed: draw from the datasets by their weights.
        """
        self.rows, self.updates = rows, updates
        self._passed = len(text.examples)
        self._stream = PromptStream(
            text.examples, seed=seed, shuffle=shuffle, mixture=(text.sizes, text.weights) if mixed else None
        )

    def of_step(self, step: int) -> RaggedBatch:
        """The rows of all optimizer steps after `step` steps of the loop, one optimizer step after the other.

        A step that dynamic sampling left short takes fewer optimizer steps, and leaves the last rows out.
        """
        count = self.rows * self.updates
        return text_rows([self._stream.at(step * count + place) for place in range(count)])

    def passes(self, steps: int) -> float:
        """How often the text was gone through after so many steps."""
        return steps * self.rows * self.updates / self._passed


def text_rows(examples: Sequence[Example]) -> RaggedBatch:
    """Examples of one row each as a batch."""
    rows = [row for example in examples for row in example.rows]
    lengths = tuple(len(row.token_ids) for row in rows)
    ends = [0, *np.cumsum(lengths).tolist()]
    tokens = np.fromiter((token for row in rows for token in row.token_ids), np.int32, count=ends[-1])
    mask = np.fromiter((counts for row in rows for counts in row.response_mask), np.bool_, count=ends[-1])
    places = list(pairwise(ends))
    return RaggedBatch(
        lengths=lengths,
        per_token={
            "token_ids": RaggedColumn([(tokens[a:b],) for a, b in places], tokens.dtype),
            "response_mask": RaggedColumn([(mask[a:b],) for a, b in places], mask.dtype),
        },
        sample_ids=tuple(f"pretraining {example.name}" for example in examples),
    )
