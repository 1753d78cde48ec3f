"""How a row of a dataset becomes examples, for each kind of data. Column names are TRL's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_core import DataError

from rlhf_algos.data import Row
from rlhf_algos.encoding import Encoder, Text, TokenRow, is_conversation, problem_of_text
from rlhf_algos.examples import Example


def preference_examples(row: Row, encoder: Encoder) -> list[Example]:
    """`prompt`, `chosen`, `rejected` (and `margin`): one example of two rows, chosen first.

    Without `prompt`, it is what chosen and rejected have in common at the start: messages of conversations,
    characters of texts.
    """
    prompt, chosen, rejected = split_pair(row)
    rows = encoder.answers(prompt, [chosen, rejected], row.place)
    columns: dict[str, tuple[float, ...]] = {}
    if row.values.get("margin") is not None:
        columns["margin"] = (_number(row, "margin"),) * 2
    return [Example(name=row.place, rows=tuple(rows), columns=columns)]


def unpaired_examples(row: Row, encoder: Encoder) -> list[Example]:
    """`prompt`, `completion`, `label`: one example with the column `desirable`; a preference pair gives two."""
    if "completion" not in row and "chosen" in row:
        prompt, chosen, rejected = split_pair(row)
        pair = encoder.answers(prompt, [chosen, rejected], row.place)
        return [
            Example(name=f"{row.place} {side}", rows=(tokens,), columns={"desirable": (label,)})
            for side, tokens, label in zip(("chosen", "rejected"), pair, (1.0, 0.0), strict=True)
        ]
    prompt, completion = _text(row, "prompt"), _text(row, "completion")
    label = _column(row, "label")
    if label not in (0, 1, True, False):
        raise DataError(f"{row.place}: label must be true or false, found {label!r}")
    tokens = encoder.answers(prompt, [completion], row.place)
    return [Example(name=row.place, rows=tuple(tokens), columns={"desirable": (float(label),)})]


def supervised_examples(row: Row, encoder: Encoder) -> list[Example]:
    """`messages` (assistant turns count), `prompt` and `completion` (that counts), or `text` (all counts)."""
    if "messages" in row:
        messages = _text(row, "messages")
        if isinstance(messages, str):
            raise DataError(f"{row.place}: messages must be a list of messages; plain text belongs into 'text'")
        return [Example(name=row.place, rows=(encoder.conversation(messages, row.place),))]
    if "prompt" in row and "completion" in row:
        tokens = encoder.answers(_text(row, "prompt"), [_text(row, "completion")], row.place)
        return [Example(name=row.place, rows=tuple(tokens))]
    if "text" not in row:
        raise DataError(
            f"{row.place}: needs the columns 'messages', or 'prompt' and 'completion', or 'text'; found "
            f"{', '.join(map(repr, row.values)) or 'none'}. If they have other names, write "
            "columns: {prompt: their_name, completion: their_name}"
        )
    text = _column(row, "text")
    if not isinstance(text, str):
        raise DataError(f"{row.place}: text must be text, found {type(text).__name__}")
    return [Example(name=row.place, rows=(encoder.whole_text(text),))]


def step_examples(row: Row, encoder: Encoder) -> list[Example]:
    """`prompt`, `completions` (the steps), `labels` (one per step, true, false or a probability).

    Each step is closed by the separator; its value is the head's output there, so the token after it is the
    counted one. The column `step_labels` has the label in that place.
    """
    steps, labels = _column(row, "completions"), numbers(row, "labels")
    if isinstance(steps, str) or not steps or not all(isinstance(step, str) for step in steps):
        raise DataError(f"{row.place}: completions must be a list of texts, one per step")
    if len(steps) != len(labels):
        raise DataError(f"{row.place}: {len(steps)} completions but {len(labels)} labels; give one label per step")
    if any(not 0 <= label <= 1 for label in labels):
        raise DataError(f"{row.place}: labels must lie between 0 and 1, found {labels}")
    tokens = encoder.prompt(_text(row, "prompt"))
    values = [0.0] * len(tokens)
    mask = [False] * len(tokens)
    for step, label in zip(steps, [None, *labels[:-1]], strict=True):
        piece = encoder.step(step)
        tokens += piece
        mask += [label is not None, *[False] * (len(piece) - 1)]
        values += [label or 0.0, *[0.0] * (len(piece) - 1)]
    row_tokens = TokenRow(token_ids=(*tokens, encoder.end_token_id), response_mask=(*mask, True))
    columns = {"step_labels": ((*values, labels[-1]),)}
    return [Example(name=row.place, rows=(row_tokens,), token_columns=columns)]


def split_pair(row: Row) -> tuple[Text, Text, Text]:
    """(prompt, chosen, rejected) of a preference row with an explicit or an implicit prompt."""
    chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
    prompt: Any = row.values.get("prompt")
    if isinstance(prompt, str) and is_conversation(chosen):
        prompt = None  # the prompt as plain text beside conversations that contain it
    if prompt is not None:
        return _text(row, "prompt"), chosen, rejected
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{row.place}: chosen and rejected must both be text or both be lists of messages")
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if isinstance(chosen, str) and common and chosen[common - 1] == " ":
        common -= 1  # tokens usually carry the space before a word
    if common in (len(chosen), len(rejected)):
        raise DataError(f"{row.place}: chosen and rejected do not differ, or one of them ends where they part")
    return chosen[:common], chosen[common:], rejected[common:]  # type: ignore[return-value]


def _column(row: Row, name: str) -> Any:
    if name not in row or row[name] is None:
        raise DataError(
            f"{row.place} has no column {name!r}; found {', '.join(map(repr, row.values)) or 'none'}. If it has "
            f"another name, write columns: {{{name}: its_name}}"
        )
    return row[name]


def _text(row: Row, name: str) -> Text:
    value = _column(row, name)
    if (problem := problem_of_text(value)) is not None:
        raise DataError(f"{row.place}: column {name!r}: {problem}")
    return value if isinstance(value, str) else [dict(message) for message in value]


def _number(row: Row, name: str) -> float:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{row.place}: {name} must be a number, found {value!r}")
    return float(value)


def numbers(row: Row, name: str) -> list[float]:
    """A column that holds a list of numbers or truth values."""
    values = _column(row, name)
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise DataError(f"{row.place}: {name} must be a list, found {type(values).__name__}")
    for value in values:
        if not isinstance(value, int | float):
            raise DataError(f"{row.place}: {name} must hold numbers or true and false, found {value!r}")
    return [float(value) for value in values]
