"""Prompts as token ids, and the endless, resumable stream of them that a run draws from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_algos import DataSource, Row, read_rows
from rlhf_core import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, tokenised once."""

    prompt_id: str
    """Its row in the data."""
    text: str
    token_ids: tuple[int, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's columns under the names that the reward function takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFormat:
    """How the rows of a data set become prompts."""

    chat: bool = False
    """Wrap plain text as a user message and apply the tokenizer's chat template; messages always get it."""
    system_prompt: str | None = None
    """The first message of every chat."""
    max_tokens: int = 1024
    """The longest prompt."""
    drop_overlong: bool = False
    """Leave longer prompts out, in place of refusing them."""


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model.

    Raises:
        ConfigError: the model has none that can be loaded, or one without an end-of-text token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.policy: no tokenizer can be loaded from {model!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.policy: the tokenizer of {model!r} has no end-of-text token; set `eos_token` in it"
        )
    return tokenizer


def read_prompts(
    source: DataSource | str, tokenizer: Any, form: PromptFormat | None = None
) -> tuple[list[Prompt], int]:
    """The prompts of a data set, and how many were dropped for their length.

    Args:
        source: where the rows are; a string is a path or the name of a data set on the hub. The column `prompt` has
            text or chat messages.
        tokenizer: the policy's.
        form: how rows become prompts.

    Raises:
        DataError: no such data, an empty or overlong prompt (with its row), chat messages without a chat template,
            or nothing left.
    """
    source = DataSource(path=source) if isinstance(source, str) else source
    return make_prompts(read_rows(source, required=("prompt",)), tokenizer, form)


def make_prompts(rows: Sequence[Row], tokenizer: Any, form: PromptFormat | None = None) -> tuple[list[Prompt], int]:
    """Tokenise rows; see `read_prompts`."""
    form = form or PromptFormat()
    prompts, dropped = [], 0
    for index, row in enumerate(rows):
        text, token_ids = _tokenise(row, tokenizer, form)
        if len(token_ids) > form.max_tokens:
            if not form.drop_overlong:
                raise DataError(
                    f"{row.place}: the prompt has {len(token_ids)} tokens, data.max_prompt_tokens is "
                    f"{form.max_tokens}; raise it, shorten the prompt, or set data.overlong=drop"
                )
            dropped += 1
            continue
        prompts.append(
            Prompt(
                prompt_id=str(index),
                text=text,
                token_ids=tuple(token_ids),
                metadata={name: value for name, value in row.values.items() if name != "prompt"},
            )
        )
    if not prompts:
        raise DataError(f"{rows[0].source}: all {dropped} prompts are longer than {form.max_tokens} tokens")
    return prompts, dropped


def _tokenise(row: Row, tokenizer: Any, form: PromptFormat) -> tuple[str, list[int]]:
    value = row["prompt"]
    messages = [{"role": "user", "content": value}] if form.chat and isinstance(value, str) else value
    if isinstance(messages, str):
        token_ids = tokenizer(messages, add_special_tokens=True)["input_ids"]
        text = messages
    elif isinstance(messages, list):
        if getattr(tokenizer, "chat_template", None) is None:
            raise DataError(
                f"{row.place}: the prompt is a list of chat messages, but the tokenizer has no chat template; use "
                "a chat model's tokenizer, or give plain text with data.chat=false"
            )
        if form.system_prompt is not None:
            messages = [{"role": "system", "content": form.system_prompt}, *messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        raise DataError(
            f"{row.place}: the prompt must be text or a list of chat messages, found {type(value).__name__}"
        )
    if not token_ids:
        raise DataError(f"{row.place}: the prompt is empty")
    return text, token_ids


class PromptStream:
    """Passes over the prompts without end, each pass in an order of its own.

    The order depends on the seed and the pass alone, so the position is all that a checkpoint needs.

    >>> stream = PromptStream(["a", "b", "c"], seed=0, shuffle=False)
    >>> stream.take(4), stream.position
    (['a', 'b', 'c', 'a'], 4)
    """

    def __init__(self, prompts: Sequence[Any], *, seed: int, shuffle: bool = True, position: int = 0) -> None:
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self.position = position
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[Any]:
        """The next `count` prompts."""
        taken = [self.at(self.position + offset) for offset in range(count)]
        self.position += count
        return taken

    def at(self, position: int) -> Any:
        """The prompt at a position, taken or not."""
        epoch, index = divmod(position, len(self._prompts))
        if self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._prompts[self._order[1][index]]
