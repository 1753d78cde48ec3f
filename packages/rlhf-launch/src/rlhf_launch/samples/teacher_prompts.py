"""What a teacher is shown in the place of a sample's own prompt, and what it says put back beside the sample."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rlhf_algos import TAUGHT, TEACHER_PROMPT, ShowsTeacherMore
from rlhf_core import (
    ConfigError,
    DataError,
    PackedFlags,
    PackedFloats,
    PackedInts,
    RaggedBatch,
    RaggedColumn,
    Run,
    Trajectory,
)
from rlhf_rollout import ScoredGroup
from torch import Tensor

from rlhf_launch.samples.prompts import Prompt

_HERE = "\ue000success\ue001"
"""Stands for the answer of another sample until there is one; no text has these characters."""


def with_teacher_prompts(
    prompts: Sequence[Prompt],
    recipe: ShowsTeacherMore,
    tokenizer: Any,
    *,
    max_tokens: int,
    longest_row: int,
    where: str,
) -> list[Prompt]:
    """The prompts with what the teacher is shown among their columns, as `teacher_prompt`.

    Args:
        prompts: of the training data.
        recipe: says what is shown.
        tokenizer: the policy's.
        max_tokens: of a sample.
        longest_row: tokens that the teacher can take.
        where: the data, for messages.

    Raises:
        DataError: a row lacks a column, or what would be shown is no prompt, or too long for the teacher.
    """
    shown = TeacherPrompts(tokenizer, recipe)
    made = []
    for prompt in prompts:
        value = _shown(prompt, recipe, where)
        answers = 2 if recipe.shows_success else 1
        tokens = len(shown.tokens(value, "")) + answers * max_tokens
        if tokens > longest_row:
            raise DataError(
                f"{where}: what the teacher is shown of prompt {prompt.prompt_id} and {answers} answer(s) of at "
                f"most {max_tokens} tokens (rollout.sampling.max_tokens) are {tokens} tokens, and the teacher "
                f"takes {longest_row}; shorten what it is shown, or lower max_tokens"
            )
        made.append(replace(prompt, metadata={**prompt.metadata, TEACHER_PROMPT: value}))
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class TaughtRows:
    """The rows of a step that a teacher judges, each after a prompt that is the teacher's own."""

    rows: RaggedBatch | None
    """The teacher's prompt and the sample's response, of the rows that are judged; None if none is."""
    places: tuple[int, ...]
    """Which rows of the step these are."""
    shown: tuple[int, ...]
    """Tokens of the teacher's prompt in each."""

    def columns(self, log_probs: RaggedColumn | None, lengths: Sequence[int]) -> dict[str, RaggedColumn | Tensor]:
        """`teacher_log_probs` at the samples' own places, and `taught` [rows].

        Args:
            log_probs: of `rows`, token by token.
            lengths: tokens of each row of the step.
        """
        taught = torch.zeros(len(lengths))
        placed: list[Any] = [(Run(0.0, length),) for length in lengths]
        for index, (place, shown) in enumerate(zip(self.places, self.shown, strict=True)):
            if log_probs is None:
                raise RuntimeError(f"the teacher was asked for {len(self.places)} row(s) and said nothing")
            said = RaggedColumn([log_probs.rows[index]], log_probs.kind, log_probs.tail).joined()[shown:]
            placed[place] = (Run(0.0, lengths[place] - len(said)), said.astype(np.float32, copy=False))
            taught[place] = 1.0
        return {"teacher_log_probs": RaggedColumn(placed, np.dtype(np.float32)), TAUGHT: taught}


class TeacherPrompts:
    """Puts the teacher's prompts before the samples of a step."""

    def __init__(self, tokenizer: Any, recipe: ShowsTeacherMore) -> None:
        self._tokenizer, self._recipe = tokenizer, recipe

    def taught(self, groups: Sequence[ScoredGroup]) -> TaughtRows:
        """The samples of a step as the teacher reads them; those that it has nothing to be shown for are left out.

        The answer that is shown is that of the best other sample of the same prompt, the first of equals.
        """
        made, places, shown = [], [], []
        place = 0
        for group in groups:
            answers = self._answers(group)
            for index, trajectory in enumerate(group.trajectories):
                if (tokens := self._prompt(trajectory, _best_other(answers, index))) is not None:
                    made.append(_after(tokens, trajectory))
                    places.append(place)
                    shown.append(len(tokens))
                place += 1
        rows = RaggedBatch.of_trajectories(made) if made else None
        return TaughtRows(rows=rows, places=tuple(places), shown=tuple(shown))

    def tokens(self, prompt: Any, success: str) -> list[int]:
        """A teacher's prompt, text or messages, as token ids, with the answer where it belongs."""
        if isinstance(prompt, str):
            return self._tokenizer(prompt.replace(_HERE, success), add_special_tokens=True)["input_ids"]
        last = {**prompt[-1], "content": prompt[-1]["content"].replace(_HERE, success)}
        text = self._tokenizer.apply_chat_template([*prompt[:-1], last], tokenize=False, add_generation_prompt=True)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _answers(self, group: ScoredGroup) -> list[tuple[float, str]]:
        """Score and text of each sample, where they are shown."""
        if not self._recipe.shows_success:
            return []
        ids = [np.asarray(trajectory.response_token_ids) for trajectory in group.trajectories]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        least = self._recipe.success_score
        return [
            (score.value if score.value >= least else -np.inf, text)
            for score, text in zip(group.scores, texts, strict=True)
        ]

    def _prompt(self, trajectory: Trajectory, success: str | None) -> list[int] | None:
        prompt = trajectory.metadata.get(TEACHER_PROMPT)
        if not prompt:
            raise DataError(f"sample {trajectory.sample_id!r} has no {TEACHER_PROMPT!r} among its columns")
        if not self._recipe.shows_success:
            return self.tokens(prompt, "")
        return None if success is None else self.tokens(prompt, success)


def _best_other(answers: Sequence[tuple[float, str]], index: int) -> str | None:
    others = [(score, -place) for place, (score, _) in enumerate(answers) if place != index and score > -np.inf]
    return answers[-max(others)[1]][1] if others else None


def _after(prompt: Sequence[int], trajectory: Trajectory) -> Trajectory:
    """A sample of one turn as if it had been sampled after another prompt."""
    start, sampled = trajectory.prompt_length, trajectory.response_length
    if start + sampled != len(trajectory.token_ids):
        raise ConfigError(f"sample {trajectory.sample_id!r} has several turns; a teacher is shown samples of one")
    size = len(prompt)
    return replace(
        trajectory,
        token_ids=PackedInts.of(prompt) + trajectory.token_ids[start:],
        response_mask=PackedFlags.joined((Run(False, size), Run(True, sampled))),
        rollout_log_probs=PackedFloats.joined((Run(0.0, size), trajectory.rollout_log_probs[start:])),
        weight_versions=PackedInts.joined((Run(-1, size), trajectory.weight_versions[start:])),
        rewards=(),
    )


def _shown(prompt: Prompt, recipe: ShowsTeacherMore, where: str) -> Any:
    """What the teacher is shown of a prompt: text, or messages."""
    template, given = recipe.teacher_template, prompt.metadata.get(TEACHER_PROMPT)
    if template is None:
        if isinstance(given, str) and given.strip():
            return given
        if isinstance(given, list) and given and all(isinstance(one.get("content"), str) for one in given):
            return given
        raise DataError(
            f"{where}: prompt {prompt.prompt_id} has {json.dumps(given, default=str)[:60]} as {TEACHER_PROMPT!r}; "
            "give what the teacher is shown, text or messages, in this column, or set algorithm.teacher_template"
        )
    if given is not None:
        raise ConfigError(
            f"{where} has a column {TEACHER_PROMPT!r}, and algorithm.teacher_template is set; leave one of them out"
        )
    own: Any = prompt.messages[-1]["content"] if prompt.messages else prompt.text
    if not isinstance(own, str):
        raise DataError(f"{where}: the last message of prompt {prompt.prompt_id} is not text")
    columns: Mapping[str, Any] = {**prompt.metadata, "prompt": own}
    if recipe.shows_success:
        columns = {**columns, "success": _HERE}
    try:
        text = template.format_map({name: str(value) for name, value in columns.items()})
    except KeyError as error:
        there = ", ".join(sorted(prompt.metadata)) or "none"
        raise DataError(
            f"{where}: algorithm.teacher_template names the column {error}, and prompt {prompt.prompt_id} has: "
            f"{there}"
        ) from None
    return [*prompt.messages[:-1], {**prompt.messages[-1], "content": text}] if prompt.messages else text
