"""From scored answers to rows that offline methods train on, with an account of what was left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from rlhf_core import ConfigError, DataError

from rlhf_algos.data.sampled import sampled_columns
from rlhf_algos.selection.answers import Answer, PromptAnswers, known_names
from rlhf_algos.selection.choices import (
    above_threshold,
    best_of_n,
    desirable,
    pair_of,
    quantile,
    quantised,
)
from rlhf_algos.selection.config import (
    BestOfNConfig,
    ConditionalConfig,
    LabelsConfig,
    PairsConfig,
    QuantileConfig,
    SelectionConfig,
    ThresholdConfig,
)

WITHOUT_ANSWER = "no answer with a score"
_WHY = {
    "alone": "fewer than two answers with a score",
    "tie": "a tie: no answer with a lower score and another text",
    "margin": "no pair so far apart as min_margin",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionReport:
    """What became of prompts and answers."""

    prompts: int
    answers: int
    unscored: int
    """Answers that cannot be chosen: the reward dropped them, or they are cut off and to be left out."""
    mean_score: float | None
    """Of all answers that have a score, chosen or not."""
    rows: int
    """Rows that were made."""
    answers_chosen: int
    truncated_chosen: int
    """Chosen answers that the limit of tokens cut off."""
    left_out: Mapping[str, tuple[str, ...]]
    """Why prompts gave no row -> their ids."""

    def lines(self, most: int = 5) -> list[str]:
        """In words, with the first ids of those left out."""
        text = f"{self.rows} rows of {self.prompts} prompts with {self.answers} answers"
        told = [text + (f" ({self.unscored} without a usable score)" if self.unscored else "")]
        if self.truncated_chosen:
            told.append(f"{self.truncated_chosen} of {self.answers_chosen} chosen answers are cut off")
        for why, ids in self.left_out.items():
            few = ", ".join(ids[:most]) + (", ..." if len(ids) > most else "")
            told.append(f"{len(ids)} prompts gave none, {why}: {few}")
        return told


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Rows to train on."""

    rows: Sequence[Mapping[str, Any]]
    """As JSON has them: `prompt` and `completion`, or `chosen` and `rejected`, with their tokens where these were
    sampled; `prompt_id` and scores beside them."""
    report: SelectionReport


@dataclass(frozen=True, slots=True)
class _Usable:
    """A prompt's answers that have what they are compared by."""

    group: PromptAnswers
    answers: Sequence[Answer]
    scores: Sequence[float]

    def distinct(self) -> _Usable:
        """The first of equal texts. Their scores may differ by noise; which of them counts must not."""
        first: dict[str, int] = {}
        for place, answer in enumerate(self.answers):
            first.setdefault(answer.text, place)
        places = list(first.values())
        return _Usable(self.group, [self.answers[i] for i in places], [self.scores[i] for i in places])


def select(groups: Sequence[PromptAnswers], config: SelectionConfig, *, seed: int = 0) -> Selection:
    """Choose among scored answers.

    Args:
        groups: prompts with their answers, see `read_answers`.
        config: the rule.
        seed: of what is drawn. A prompt's draws depend on it and on the prompt's id alone.

    Raises:
        ConfigError: there is no such part of the score.
        DataError: nothing is chosen at all, or scores that make no levels.
    """
    names = known_names(groups)
    wanted = config.names if isinstance(config, ConditionalConfig) else (config.by,)
    if unknown := [name for name in wanted if name not in names]:
        raise ConfigError(f"select: answers have no {unknown[0]!r}; there are {', '.join(names)}")
    usable, unscored = [], 0
    left_out: dict[str, list[str]] = {}
    for group in groups:
        kept = [a for a in group.answers if not (config.leave_out_truncated and a.truncated)]
        kept = [a for a in kept if all(a.value(name) is not None for name in wanted)]
        unscored += len(group.answers) - len(kept)
        if kept:
            usable.append(_Usable(group, kept, [a.value(wanted[0]) for a in kept]))  # type: ignore[misc]
        else:
            left_out.setdefault(WITHOUT_ANSWER, []).append(group.prompt_id)
    rows: list[dict[str, Any]] = []
    chosen: list[Answer] = []
    for one, (made, answers, why) in zip(usable, _chosen(usable, config, seed), strict=True):
        if not made:
            left_out.setdefault(why, []).append(one.group.prompt_id)
        rows += made
        chosen += answers
    scores = [a.score for group in groups for a in group.answers if a.score is not None]
    report = SelectionReport(
        mean_score=math.fsum(scores) / len(scores) if scores else None,
        prompts=len(groups),
        answers=sum(len(group.answers) for group in groups),
        unscored=unscored,
        rows=len(rows),
        answers_chosen=len(chosen),
        truncated_chosen=sum(answer.truncated for answer in chosen),
        left_out={why: tuple(ids) for why, ids in left_out.items()},
    )
    if not rows:
        raise DataError(f"nothing is left to train on: {'; '.join(report.lines())}")
    return Selection(rows=rows, report=report)


_Made = tuple[list[dict[str, Any]], list[Answer], str]
"""The rows of a prompt, the answers in them, and why there is none."""


def _chosen(usable: Sequence[_Usable], config: SelectionConfig, seed: int) -> Iterator[_Made]:
    if isinstance(config, ConditionalConfig):
        yield from _conditional(usable, config)
        return
    rule: Callable[[_Usable, Random], _Made]
    if isinstance(config, PairsConfig):
        rule = partial(_pair, config=config)
    elif isinstance(config, LabelsConfig):
        rule = partial(_labelled, config=config)
    else:
        floor = None
        if isinstance(config, QuantileConfig) and config.of == "all" and usable:
            floor = quantile([score for one in usable for score in one.scores], config.quantile)
        rule = partial(_kept, config=config, floor=floor)
    for one in usable:
        yield rule(one, Random(f"{seed}/{one.group.prompt_id}"))


def _kept(
    one: _Usable, draw: Random, *, config: BestOfNConfig | ThresholdConfig | QuantileConfig, floor: float | None
) -> _Made:
    """The answers to learn, a row each."""
    one = one.distinct()
    if isinstance(config, BestOfNConfig):
        places, why = best_of_n(one.scores, k=config.k, draw=draw), ""
    elif isinstance(config, ThresholdConfig):
        places, why = above_threshold(one.scores, config.threshold), f"none above {config.threshold:g}"
    else:
        floor = quantile(one.scores, config.quantile) if floor is None else floor
        places = [place for place, score in enumerate(one.scores) if score >= floor]
        why = f"none from the quantile {floor:g} on"
    rows = [_row(one, completion=one.answers[p]) | {"score": one.scores[p]} for p in places]
    return rows, [one.answers[p] for p in places], why


def _pair(one: _Usable, draw: Random, *, config: PairsConfig) -> _Made:
    texts = [answer.text for answer in one.answers]
    found = pair_of(one.scores, texts, rejected=config.rejected, min_margin=config.min_margin, draw=draw)
    if isinstance(found, str):
        return [], [], _WHY[found]
    chosen, rejected = found
    scores = {"chosen_score": one.scores[chosen], "rejected_score": one.scores[rejected]}
    row = _row(one, chosen=one.answers[chosen], rejected=one.answers[rejected]) | scores
    return [row], [one.answers[chosen], one.answers[rejected]], ""


def _labelled(one: _Usable, draw: Random, *, config: LabelsConfig) -> _Made:
    labels = desirable(one.scores, config.threshold)
    places = [place for place, label in enumerate(labels) if label is not None]
    rows = [_row(one, completion=one.answers[p]) | {"label": labels[p], "score": one.scores[p]} for p in places]
    return rows, [one.answers[p] for p in places], "a tie: all answers at the mean of their scores"


def _row(one: _Usable, **answers: Answer) -> dict[str, Any]:
    samples = {name: answer.sample for name, answer in answers.items()}
    return {"prompt_id": one.group.prompt_id, **sampled_columns(one.group.row, **samples)}


def _conditional(usable: Sequence[_Usable], config: ConditionalConfig) -> Iterator[_Made]:
    """Every answer after its prompt with the levels in it. The prompt is another one than was sampled from, so the
    rows hold text alone."""
    everyone = [answer for one in usable for answer in one.answers]
    columns = [_levels(name, [a.value(name) for a in everyone], config) for name in config.names]  # type: ignore[misc]
    levels = iter(zip(*columns, strict=True))
    for one in usable:
        rows = []
        for answer in one.answers:
            own = next(levels)
            text = sampled_columns(one.group.row, completion={"text": answer.text})
            row = {"prompt_id": one.group.prompt_id, **text, "prompt": _conditioned(one, own, config)}
            rows.append(row | {"levels": dict(zip(config.names, own, strict=True))})
        yield rows, list(one.answers), ""


def _levels(name: str, scores: Sequence[float], config: ConditionalConfig) -> list[int]:
    if not scores:
        return []
    try:
        found = quantised(scores, config.levels, bins=config.bins)
    except ValueError as error:
        raise DataError(
            f"select: {name} makes no levels: {error}; there is nothing to tell answers apart by"
        ) from None
    if config.levels not in found:
        raise DataError(
            f"select: no answer has the highest level of {name}, {config.levels}, since many share the highest "
            "score; nothing could be asked for at that level. Write bins: width, or fewer levels"
        )
    return found


def _conditioned(one: _Usable, levels: tuple[int, ...], config: ConditionalConfig) -> Any:
    row = one.group.row
    prompt = row.values.get("prompt_source") or row["prompt"]
    if isinstance(prompt, str):
        return config.condition(prompt, levels)
    messages = [dict(message) for message in prompt]
    last = next((m for m in reversed(messages) if m.get("role") == "user"), None)
    if last is None or not isinstance(last.get("content"), str):
        raise DataError(f"{row.place}: the prompt has no message of a user with text, which could hold a condition")
    last["content"] = config.condition(last["content"], levels)
    return messages
