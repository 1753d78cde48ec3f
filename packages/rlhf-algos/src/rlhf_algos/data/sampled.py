"""Rows that hold sampled tokens: those that `rlhf generate` writes, and those that are chosen among them.

Sampled tokens are trained on as they are. Text that is tokenised anew can give other tokens than were sampled, and
an answer that was cut off would seem to have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_core import DataError

from rlhf_algos.data.encoding import Encoder, Text, TokenRow
from rlhf_algos.data.image_encoding import RowEncoder
from rlhf_algos.data.sources import Row

PROMPT_TOKENS = "prompt_token_ids"
_TOKENS = "_token_ids"
_KNOWN = frozenset(
    {"prompt_id", "prompt", PROMPT_TOKENS, "prompt_source", "columns", "log_prob_meaning", "samples"}
)


def holds_samples(row: Row) -> bool:
    """Whether a row is one that `rlhf generate` or `rlhf score` wrote."""
    return "samples" in row and PROMPT_TOKENS in row and isinstance(row["samples"], list)


def sampled_columns(row: Row, **samples: Any) -> dict[str, Any]:
    """A prompt and some of its samples in the columns that are trained on, by the names given.

    `prompt` is the prompt as the data had it, and `<name>` the text of a sample. Where the tokens were sampled,
    they are in `prompt_token_ids` and `<name>_token_ids`.
    """
    source: Text = row.values.get("prompt_source") or row["prompt"]
    columns: dict[str, Any] = {"prompt": source}
    for name, sample in samples.items():
        text = sample["text"]
        columns[name] = text if isinstance(source, str) else [{"role": "assistant", "content": text}]
    # Tokens without log-probs were made of text, answer by answer, for the sake of a score.
    if all(sample.get("log_probs") is not None for sample in samples.values()):
        columns[PROMPT_TOKENS] = row[PROMPT_TOKENS]
        columns |= {name + _TOKENS: sample["token_ids"] for name, sample in samples.items()}
    return columns


def lone_sample(row: Row) -> Row:
    """A row of `rlhf generate` with one sample as `prompt` and `completion`; any other row as it is.

    Raises:
        DataError: it has several samples, or none: which of them to learn is not for a reader to guess.
    """
    if not holds_samples(row):
        return row
    if len(row["samples"]) != 1:
        raise DataError(
            f"{row.place} has {len(row['samples'])} samples of its prompt, and only one can be its completion; "
            "choose among them with `rlhf select best_of_n FILE -o chosen.jsonl` (or threshold, quantile, "
            "conditional), and train on that file"
        )
    return _with(row, sampled_columns(row, completion=row["samples"][0]))


def better_sample(row: Row) -> Row | None:
    """A row of `rlhf generate` with two scored samples as `prompt`, `chosen`, `rejected`; any other row as it is.

    None if the scores are equal, or the reward dropped one of the two: then none is preferred.

    Raises:
        DataError: it has another number of samples, or they were never scored.
    """
    if not holds_samples(row):
        return row
    samples = row["samples"]
    if len(samples) != 2:
        raise DataError(
            f"{row.place} has {len(samples)} samples of its prompt, and a pair needs two; choose them with "
            "`rlhf select pairs FILE -o pairs.jsonl` (for kto also labels), and train on that file"
        )
    if any("score" not in sample for sample in samples):
        raise DataError(
            f"{row.place} has samples without scores, so that none is preferred; score them with `rlhf score`"
        )
    first, second = samples
    if first["score"] is None or second["score"] is None or first["score"] == second["score"]:
        return None
    chosen, rejected = (first, second) if first["score"] > second["score"] else (second, first)
    return _with(row, sampled_columns(row, chosen=chosen, rejected=rejected))


def sampled_rows(row: Row, names: Sequence[str], encoder: Encoder) -> list[TokenRow] | None:
    """The rows of tokens of a prompt with each of the answers in the columns `names`; None if these hold no tokens,
    or the prompt has images.

    Raises:
        DataError: tokens that are no list of numbers, or those of another tokenizer than the model's.
    """
    columns = [name + _TOKENS for name in names]
    if isinstance(encoder, RowEncoder):  # the sampled tokens have one for each image, training its whole place
        return None
    if PROMPT_TOKENS not in row or not all(column in row for column in columns):
        return None
    prompt = _token_ids(row, PROMPT_TOKENS)
    rows = []
    for name, column in zip(names, columns, strict=True):
        answer = _token_ids(row, column)
        _check_tokenizer(row, name, answer, encoder)
        mask = (False,) * len(prompt) + (True,) * len(answer)
        rows.append(TokenRow(token_ids=prompt + answer, response_mask=mask))
    return rows


def _with(row: Row, columns: dict[str, Any]) -> Row:
    """The row with its samples replaced by columns."""
    others = {name: value for name, value in row.values.items() if name not in _KNOWN}
    return Row(source=row.source, number=row.number, values={**others, **columns})


def _token_ids(row: Row, column: str) -> tuple[int, ...]:
    values = row[column]
    fine = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
    if not fine or not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise DataError(f"{row.place}: {column} must be a list of token ids, found {str(values)[:40]!r}")
    return tuple(values)


def _check_tokenizer(row: Row, name: str, token_ids: Sequence[int], encoder: Encoder) -> None:
    """Refuse tokens of another vocabulary: they would be trained on as other words."""
    answer = row.values.get(name)
    text = answer if isinstance(answer, str) else "".join(str(m.get("content", "")) for m in answer or ())
    # A model's vocabulary may be larger than its tokenizer's, and such tokens, which say nothing, may be sampled.
    found = encoder.tokenizer.decode(list(token_ids), skip_special_tokens=True)
    if found != text:
        raise DataError(
            f"{row.place}: {name}{_TOKENS} are not tokens of this model's tokenizer: they say "
            f"{found[:40]!r}, the column {name!r} has {text[:40]!r}. To train a model with another tokenizer, "
            f"read the text alone: only: [prompt, {name}, ...] beside the path"
        )
