"""How a row of a dataset becomes examples, for each kind of data. Column names are TRL's or OpenRLHF's.

OpenRLHF's `input` and `output` stand for `prompt` and `completion`. A row that has the columns of two readings
is an error, not a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rlhf_core import DataError

from rlhf_algos.data.encoding import Encoder, Text, TokenRow, is_conversation, problem_of_text
from rlhf_algos.data.examples import Example
from rlhf_algos.data.image_encoding import encoder_of
from rlhf_algos.data.images import row_images
from rlhf_algos.data.sampled import better_sample, lone_sample, sampled_rows
from rlhf_algos.data.sources import Row


def preference_examples(row: Row, encoder: Encoder) -> list[Example]:
    """`prompt`, `chosen`, `rejected` (and `margin`): one example of two rows, chosen first; none if both are equal.

    Without `prompt`, it is what chosen and rejected have in common at the start: messages of conversations,
    characters of texts. A row of `rlhf generate` with two scored samples is a pair, see `better_sample`.
    """
    if (pair := better_sample(row)) is None or _equal_pair(pair):
        return []
    row, rows = pair, _pair_rows(pair, encoder_of(pair, encoder))
    columns: dict[str, tuple[float, ...]] = {}
    if row.values.get("margin") is not None:
        columns["margin"] = (_number(row, "margin"),) * 2
    return [Example(name=row.place, rows=tuple(rows), columns=columns)]


def _pair_rows(row: Row, encoder: Encoder) -> list[TokenRow]:
    """Chosen and rejected: their tokens where the row has them, else their text."""
    if (sampled := sampled_rows(row, ("chosen", "rejected"), encoder)) is not None:
        return sampled
    prompt, chosen, rejected = split_pair(row)
    return encoder.answers(prompt, [chosen, rejected], row.place)


def triple_examples(row: Row, encoder: Encoder) -> list[Example]:
    """`prompt`, `chosen`, `rejected` and `reference`, the gold answer: one example of three rows in this order.

    None if chosen and rejected are equal.
    """
    if _equal_pair(row):
        return []
    encoder = encoder_of(row, encoder)
    prompt, chosen, rejected = split_pair(row)
    gold = _text(row, "reference")
    if isinstance(gold, str) != isinstance(chosen, str):
        raise DataError(f"{row.place}: chosen, rejected and reference must all be text or all be lists of messages")
    # Without a column of its own the prompt is what chosen and rejected share; gold must begin with it too.
    if row.values.get(_one_of(row, "prompt", "input")) is None:
        if gold[: len(prompt)] != prompt:
            raise DataError(f"{row.place}: reference does not begin with the prompt that chosen and rejected share")
        gold = gold[len(prompt) :]
    return [Example(name=row.place, rows=tuple(encoder.answers(prompt, [chosen, rejected, gold], row.place)))]


def unpaired_examples(row: Row, encoder: Encoder) -> list[Example]:
    """`prompt`, `completion`, `label`: one example with the column `desirable`; a preference pair gives two, one of
    equal answers none.

    `output` may stand for `completion`, `input` for `prompt`; without these a conversation's last message is the
    completion.
    """
    if (made := better_sample(row)) is None:
        return []
    row = made
    if "completion" not in row and "output" not in row and "chosen" in row:
        if _equal_pair(row):
            return []
        pair = _pair_rows(row, encoder_of(row, encoder))
        return [
            Example(name=f"{row.place} {side}", rows=(tokens,), columns={"desirable": (label,)})
            for side, tokens, label in zip(("chosen", "rejected"), pair, (1.0, 0.0), strict=True)
        ]
    encoder = encoder_of(row, encoder)
    answer = _one_of(row, "completion", "output")
    prompt, completion = _prompt_and_answer(row, answer)
    label = _column(row, "label")
    if label not in (0, 1, True, False):
        raise DataError(f"{row.place}: label must be true or false, found {label!r}")
    sampled = sampled_rows(row, (answer,), encoder)
    tokens = encoder.answers(prompt, [completion], row.place) if sampled is None else sampled
    return [Example(name=row.place, rows=tuple(tokens), columns={"desirable": (float(label),)})]


_SUPERVISED = (("messages",), ("prompt", "completion"), ("input", "output"), ("text",))


def supervised_examples(row: Row, encoder: Encoder) -> list[Example]:
    """`messages` (assistant turns count), `prompt` and `completion` (that counts), or `text` (all counts).

    Also OpenRLHF's `input` and `output`, or a conversation in `input` alone, or a row of `rlhf generate` with one
    sample.
    """
    row = lone_sample(row)
    readings = [names for names in _SUPERVISED if all(name in row for name in names)]
    if not readings and "input" in row and is_conversation(row["input"]):
        readings = [("input",)]
    if not readings:
        raise DataError(
            f"{row.place}: needs the columns 'messages', or 'prompt' and 'completion' (or 'input' and 'output'), "
            f"or 'text'; found {', '.join(map(repr, row.values)) or 'none'}. If they have other names, write "
            "columns: {prompt: their_name, completion: their_name}"
        )
    if len(readings) > 1:
        choices = " or ".join(f"only: [{', '.join(names)}]" for names in readings)
        raise DataError(f"{row.place} can be read in {len(readings)} ways; write {choices} beside its path")
    if readings == [("input", "output")] and "instruction" in row:
        raise DataError(
            f"{row.place} has an instruction beside input and output, so input is not the whole prompt; merge both "
            "into one column, or write columns: {prompt: instruction, completion: output}"
        )
    names, encoder = readings[0], encoder_of(row, encoder)
    if len(names) == 2:
        if (tokens := sampled_rows(row, names[1:], encoder)) is None:
            tokens = encoder.answers(_text(row, names[0]), [_text(row, names[1])], row.place)
        return [Example(name=row.place, rows=tuple(tokens))]
    value = _text(row, names[0])
    if names == ("text",):
        if not isinstance(value, str):
            raise DataError(f"{row.place}: text must be text, found {type(value).__name__}")
        return [Example(name=row.place, rows=(encoder.whole_text(value),))]
    if isinstance(value, str):
        raise DataError(f"{row.place}: {names[0]} must be a list of messages; plain text belongs into 'text'")
    return [Example(name=row.place, rows=(encoder.conversation(value, row.place),))]


def step_examples(row: Row, encoder: Encoder) -> list[Example]:
    """`prompt`, `completions` (the steps), `labels` (one per step, true, false or a probability).

    Each step is closed by the separator; its value is the head's output there, so the token after it is the
    counted one. The column `step_labels` has the label in that place; for a language-model head `candidate_ids` has
    the two label tokens there.

    OpenRLHF's form is `input`, a text in which each step ends with the placeholder token, and `label` (or
    `labels`), a list of label tokens or of probabilities.
    """
    if row_images(row):
        raise DataError(f"{row.place} has images, which rows of reasoning steps cannot have; leave the column out")
    if "input" in row and "completions" not in row:
        return [_placeholder_example(row, encoder)]
    steps, labels = _column(row, "completions"), numbers(row, "labels")
    if isinstance(steps, str) or not steps or not all(isinstance(step, str) for step in steps):
        raise DataError(f"{row.place}: completions must be a list of texts, one per step")
    if len(steps) != len(labels):
        raise DataError(f"{row.place}: {len(steps)} completions but {len(labels)} labels; give one label per step")
    _check_labels(row, labels)
    tokens = encoder.prompt(_text(row, "prompt"))
    values = [0.0] * len(tokens)
    mask = [False] * len(tokens)
    for step, label in zip(steps, [None, *labels[:-1]], strict=True):
        piece = encoder.step(step)
        tokens += piece
        mask += [label is not None, *[False] * (len(piece) - 1)]
        values += [label or 0.0, *[0.0] * (len(piece) - 1)]
    row_tokens = TokenRow(token_ids=(*tokens, encoder.end_token_id), response_mask=(*mask, True))
    return [_step_example(row, row_tokens, (*values, labels[-1]), encoder)]


def _placeholder_example(row: Row, encoder: Encoder) -> Example:
    text, name = _column(row, "input"), _one_of(row, "label", "labels")
    if not isinstance(text, str):
        raise DataError(f"{row.place}: input must be text with a placeholder after each step")
    given = _column(row, name)
    if isinstance(given, Sequence) and not isinstance(given, str) and any(isinstance(v, str) for v in given):
        labels = [encoder.label_value(value, row.place) for value in given]
    else:
        labels = numbers(row, name)
    _check_labels(row, labels)
    tokens = [*encoder.tokenizer(text, add_special_tokens=False)["input_ids"], encoder.end_token_id]
    marks = [place for place, token in enumerate(tokens) if token == encoder.placeholder_id(row.place)]
    if len(marks) != len(labels):
        raise DataError(f"{row.place}: {len(marks)} placeholders but {len(labels)} labels; give one label per step")
    values = [0.0] * len(tokens)
    mask = [False] * len(tokens)
    for place, label in zip(marks, labels, strict=True):
        mask[place + 1], values[place + 1] = True, label
    return _step_example(row, TokenRow(token_ids=tuple(tokens), response_mask=tuple(mask)), tuple(values), encoder)


def _step_example(row: Row, tokens: TokenRow, values: tuple[float, ...], encoder: Encoder) -> Example:
    ids = encoder.label_token_ids
    counted = torch.tensor([ids] * sum(tokens.response_mask)) if ids else None
    return Example(
        name=row.place,
        rows=(tokens,),
        token_columns={"step_labels": (values,)},
        counted_tensors={} if counted is None else {"candidate_ids": (counted,)},
    )


def _check_labels(row: Row, labels: Sequence[float]) -> None:
    if not labels or any(not 0 <= label <= 1 for label in labels):
        raise DataError(f"{row.place}: labels must lie between 0 and 1, one per step; found {list(labels)}")


def _equal_pair(row: Row) -> bool:
    """Whether both answers of a pair are the same: public collections have such rows, and they prefer nothing."""
    return _text(row, "chosen") == _text(row, "rejected")


def split_pair(row: Row) -> tuple[Text, Text, Text]:
    """(prompt, chosen, rejected) of a preference row with an explicit or an implicit prompt.

    Raises:
        DataError: an answer is empty, or the two cannot be told apart.
    """
    chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if _is_empty(answer):
            raise DataError(f"{row.place}: {name} is empty; give the answer, or remove the row")
    name = _one_of(row, "prompt", "input")
    prompt: Any = row.values.get(name)
    if isinstance(prompt, str) and is_conversation(chosen):
        prompt = None  # the prompt as plain text beside conversations that contain it
    if prompt is not None:
        return _text(row, name), chosen, rejected
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


def _is_empty(answer: Text) -> bool:
    """Whether an answer, or the last message of a conversation, says nothing and calls no tool."""
    if isinstance(answer, str):
        return not answer.strip()
    last = answer[-1]
    content = last.get("content")
    return not (content.strip() if isinstance(content, str) else content) and not last.get("tool_calls")


def _prompt_and_answer(row: Row, answer: str) -> tuple[Text, Text]:
    """The prompt and the column `answer`; without a prompt, a conversation's last message is the answer."""
    completion = _text(row, answer)
    name = _one_of(row, "prompt", "input")
    if row.values.get(name) is not None or isinstance(completion, str):
        return _text(row, name), completion
    if len(completion) < 2 or completion[-1]["role"] != "assistant":
        raise DataError(
            f"{row.place}: without a prompt, {answer} must be a conversation that ends with the assistant's answer"
        )
    return completion[:-1], completion[-1:]


def _one_of(row: Row, name: str, other: str) -> str:
    """Which of two names for the same thing the row uses; the first one if neither.

    Raises:
        DataError: it has both.
    """
    if name in row and other in row:
        raise DataError(
            f"{row.place} has both {name!r} and {other!r}; say which columns to read, with only: [...] beside its "
            "path"
        )
    return other if other in row else name


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
