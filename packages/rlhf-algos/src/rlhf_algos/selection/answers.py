"""The answers to a prompt with their scores, as `rlhf generate` and `rlhf score` write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core import DataError

from rlhf_algos.data.sampled import holds_samples
from rlhf_algos.data.sources import DataSource, Row, read_rows

SCORE = "score"
"""The name of the whole score; any other name is that of a part of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer."""

    text: str
    score: float | None
    """None where the reward dropped the sample."""
    components: Mapping[str, float] = field(default_factory=dict)
    """What the parts of the reward gave, by name."""
    truncated: bool = False
    """Cut off by the limit of tokens."""
    sample: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """As it stands in the file."""

    def value(self, by: str) -> float | None:
        """The score, or the part of it with that name; None where there is none."""
        return self.score if by == SCORE else self.components.get(by)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptAnswers:
    """A prompt with its answers."""

    prompt_id: str
    answers: tuple[Answer, ...]
    row: Row
    """As it stands in the file."""


def read_answers(source: DataSource | str) -> list[PromptAnswers]:
    """The rows of a file that `rlhf generate` or `rlhf score` wrote, in the order of the prompts' ids.

    The file has them in the order in which they were finished, which is another one in every run.

    Raises:
        DataError: no such file, a row of something else, samples that were never scored, or a prompt that is there
            twice; names the row.
    """
    found = [answers_of(row) for row in read_rows(source)]
    first: dict[str, PromptAnswers] = {}
    for one in found:
        if one.prompt_id in first:
            raise DataError(
                f"{one.row.place} has the prompt {one.prompt_id!r} of {first[one.prompt_id].row.place} again; give "
                "the files of one run of `rlhf generate` or `rlhf score` each by itself"
            )
        first[one.prompt_id] = one
    return sorted(found, key=lambda one: _order(one.prompt_id))


def answers_of(row: Row) -> PromptAnswers:
    """The answers in a row.

    Raises:
        DataError: it is none of `rlhf generate` or `rlhf score`, or its samples have no scores.
    """
    if not holds_samples(row) or not isinstance(row.values.get("prompt_id"), str):
        raise DataError(
            f"{row.place} is not one of `rlhf generate` or `rlhf score`; found "
            f"{', '.join(map(repr, row.values)) or 'no columns'}. Give answers scores with `rlhf score` first"
        )
    answers = tuple(_answer(row, sample) for sample in row["samples"])
    return PromptAnswers(prompt_id=row["prompt_id"], answers=answers, row=row)


def _answer(row: Row, sample: Any) -> Answer:
    if not isinstance(sample, Mapping) or not isinstance(sample.get("text"), str):
        raise DataError(f"{row.place}: a sample must have a text, found {str(sample)[:60]!r}")
    if SCORE not in sample:
        raise DataError(
            f"{row.place} has a sample without a score, so that nothing can be chosen; score the file with "
            "`rlhf score`, or generate it with a reward"
        )
    score, components = sample[SCORE], sample.get("score_components") or {}
    for name, value in {SCORE: score, **components}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise DataError(f"{row.place}: {name} must be a number or null, found {value!r}")
        if value is not None and not math.isfinite(value):
            raise DataError(f"{row.place}: {name} must be finite, found {value!r}")
    return Answer(
        text=sample["text"],
        score=score,
        components=components,
        truncated=sample.get("finish_reason") == "length",
        sample=sample,
    )


def known_names(groups: Sequence[PromptAnswers]) -> list[str]:
    """The names that answers can be compared by: the score and its parts."""
    parts = {name for group in groups for answer in group.answers for name in answer.components}
    return [SCORE, *sorted(parts - {SCORE})]


def _order(prompt_id: str) -> tuple[int, int, str]:
    """Numbers as numbers, and before other names."""
    return (0, int(prompt_id), "") if prompt_id.isdecimal() else (1, 0, prompt_id)
