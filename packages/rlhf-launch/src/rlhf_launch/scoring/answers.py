"""Answers that are there already: the rows of `rlhf generate`, or of prompts with their responses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_algos import DataSection, LengthSection, Row, holds_samples, read_rows
from rlhf_core import ConfigError, DataError, PackedFlags, PackedInts, Run, Trajectory

from rlhf_launch.generation.rows import row_of
from rlhf_launch.samples.prompts import Prompt, PromptFormat, make_prompts

_NO_LIMIT = LengthSection(max_prompt_tokens=1 << 31)
"""Answers are there: a prompt is scored with them, however long it is."""
_ANSWERS = ("response", "responses")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A prompt with answers to it."""

    prompt: Prompt
    place: str
    """File and row."""
    samples: Sequence[Mapping[str, Any]]
    """As `rlhf generate` writes them, without scores. Those made of text have no log-probs."""
    row: Mapping[str, Any] | None = None
    """As it was read, where `rlhf generate` or `rlhf score` wrote it."""

    @property
    def texts(self) -> list[str]:
        """The answers."""
        return [sample["text"] for sample in self.samples]

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return max(len(sample["token_ids"]) for sample in self.samples)

    def trajectories(self) -> list[Trajectory]:
        """What reward functions take."""
        size, tokens = len(self.prompt.token_ids), PackedInts.of(self.prompt.token_ids)
        return [
            Trajectory(
                sample_id=f"{self.prompt.prompt_id}/{index}",
                group_id=self.prompt.prompt_id,
                token_ids=PackedInts.joined((tokens, PackedInts.of(sample["token_ids"]))),
                response_mask=PackedFlags.joined((Run(False, size), Run(True, len(sample["token_ids"])))),
                # No reward reads what the sampler's distribution was.
                rollout_log_probs=(0.0,) * (size + len(sample["token_ids"])),
                weight_versions=PackedInts.joined((Run(-1, size), Run(0, len(sample["token_ids"])))),
                truncated=sample["finish_reason"] != "stop",
                metadata={**self.prompt.metadata, "prompt": self.prompt.text},
            )
            for index, sample in enumerate(self.samples)
        ]

    def written(self, scores: Any) -> dict[str, Any]:
        """The row of the output: everything that was in the input's, with these scores."""
        meaning = None if self.row is None else self.row.get("log_prob_meaning")
        made = row_of(self.prompt, self.samples, scores, meaning=meaning)
        return made if self.row is None else {**self.row, "samples": made["samples"]}


def load_answers(data: DataSection, tokenizer: Any) -> list[Answered]:
    """Read prompts with their answers.

    Args:
        data: `train` is the dataset, one; the rest says how a prompt becomes tokens where the rows have none.
        tokenizer: the policy's.

    Raises:
        ConfigError: several datasets.
        DataError: a row without a prompt or an answer, tokens of another tokenizer, or a prompt that is there
            twice; names the row.
    """
    if len(data.train) != 1:
        raise ConfigError(f"rlhf score writes a row for each row of one dataset; data.train has {len(data.train)}")
    rows = read_rows(data.train[0])
    form = replace(PromptFormat.of(data, _NO_LIMIT), lengths=_NO_LIMIT)
    found = [
        _sampled(row, tokenizer) if holds_samples(row) else _given(row, number, tokenizer, form)
        for number, row in enumerate(rows)
    ]
    places: dict[str, str] = {}
    for one in found:
        if (name := one.prompt.prompt_id) in places:
            raise DataError(f"{one.place} has the prompt_id {name!r} of {places[name]}; every row needs its own")
        places[name] = one.place
    return found


def digest_of(answered: Sequence[Answered]) -> str:
    """Hash of the prompts, the answers and the columns: rows of other data do not share a file."""
    digest = hashlib.sha256()
    for one in answered:
        samples = [(sample["text"], list(sample["token_ids"])) for sample in one.samples]
        content = [one.prompt.prompt_id, one.prompt.token_ids.tolist(), dict(one.prompt.metadata), samples]
        digest.update(json.dumps(content, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:32]


def _sampled(row: Row, tokenizer: Any) -> Answered:
    """A row of `rlhf generate`."""
    try:
        columns = row.values.get("columns") or {}
        if not isinstance(row["prompt_id"], str) or not isinstance(row["prompt"], str):
            raise TypeError("prompt_id and prompt must be text")
        prompt = Prompt(
            prompt_id=row["prompt_id"],
            text=row["prompt"],
            token_ids=tuple(int(token) for token in row["prompt_token_ids"]),
            metadata=dict(columns),
            source=row.values.get("prompt_source"),
        )
        samples = [_without_score(sample) for sample in row["samples"]]
        if not samples or not len(prompt.token_ids):
            raise ValueError("a prompt without tokens, or without samples")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{row.place} is not one of `rlhf generate` ({type(error).__name__}: {error}); complete the file with "
            "the command that wrote it, or give another"
        ) from None
    for sample in samples:
        _check_tokens(row, sample, tokenizer)
    return Answered(prompt=prompt, place=row.place, samples=samples, row=row.values)


def _without_score(sample: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in sample.items() if not name.startswith("score")}
    if not isinstance(own["text"], str) or not own["token_ids"] or own["finish_reason"] is None:
        raise ValueError("a sample needs text, token_ids and finish_reason")
    return own


def _check_tokens(row: Row, sample: Mapping[str, Any], tokenizer: Any) -> None:
    """Refuse tokens of another vocabulary, which a reward model would read as other words."""
    ids, text = sample["token_ids"], sample["text"]
    if sample.get("log_probs") is None:
        same = ids == _encoded(text, tokenizer)
    else:
        same = tokenizer.decode(ids, skip_special_tokens=True) == text
    if not same:
        raise DataError(
            f"{row.place}: the sample {text[:40]!r} has tokens of another tokenizer; give the model that generated "
            "it as model.path (or its tokenizer as model.tokenizer)"
        )


def _given(row: Row, number: int, tokenizer: Any, form: PromptFormat) -> Answered:
    """A row of a prompt with its response or responses; a conversation's last message is its response."""
    texts = _texts(row)
    values = {name: value for name, value in row.values.items() if name not in _ANSWERS}
    (prompt,), _ = make_prompts([replace(row, values=values)], tokenizer, form, first_id=number)
    samples = [
        {
            "text": text,
            "token_ids": _encoded(text, tokenizer),
            "log_probs": None,
            "weight_versions": None,
            "finish_reason": "stop",
        }
        for text in texts
    ]
    return Answered(prompt=prompt, place=row.place, samples=samples)


def _encoded(text: str, tokenizer: Any) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _texts(row: Row) -> list[str]:
    given = [name for name in _ANSWERS if row.values.get(name) is not None]
    if len(given) == 2:
        raise DataError(f"{row.place} has both 'response' and 'responses'; leave one out, with only: [...]")
    if given == ["responses"]:
        answers = row["responses"]
        if not isinstance(answers, list) or not answers:
            raise DataError(f"{row.place}: responses must be a list of texts, found {str(answers)[:40]!r}")
    elif given:
        answers = [row["response"]]
    else:
        messages = row.values.get("messages")
        last = messages[-1] if isinstance(messages, list) and messages else None
        if "prompt" in row or not isinstance(last, Mapping) or last.get("role") != "assistant":
            raise DataError(
                f"{row.place} has no answer: it needs the column 'response' or 'responses', or 'messages' that end "
                f"with the assistant's; found {', '.join(map(repr, row.values)) or 'none'}. If it has another "
                "name, write columns: {response: its_name} beside the path"
            )
        answers = [last.get("content")]
    return [_text(row, answer) for answer in answers]


def _text(row: Row, answer: Any) -> str:
    """An answer as text; the content of a list with the assistant's message alone."""
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], Mapping):
        answer = answer[0].get("content")
    if not isinstance(answer, str):
        raise DataError(f"{row.place}: an answer must be text, found {str(answer)[:40]!r}")
    return answer
