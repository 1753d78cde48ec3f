"""Prompts as token ids, and the endless, resumable stream of them that a run draws from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_algos import Row
from rlhf_core import DataError

from rlhf_launch.config.run import DataSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, tokenised once."""

    prompt_id: str
    """Its row in the data."""
    text: str
    token_ids: tuple[int, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's columns under the names that the reward function takes."""


def make_prompts(rows: Sequence[Row], tokenizer: Any, config: DataSection) -> tuple[list[Prompt], int]:
    """Tokenise rows; returns the prompts and how many were dropped for their length.

    Raises:
        DataError: an empty or overlong prompt (with its row), chat messages without a chat template, or nothing
            left.
    """
    prompts, dropped = [], 0
    for index, row in enumerate(rows):
        text, token_ids = _tokenise(row, tokenizer, config)
        if len(token_ids) > config.max_prompt_tokens:
            if config.overlong == "error":
                raise DataError(
                    f"{row.place}: the prompt has {len(token_ids)} tokens, data.max_prompt_tokens is "
                    f"{config.max_prompt_tokens}; raise it, shorten the prompt, or set data.overlong=drop"
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
        raise DataError(
            f"{config.prompts}: all {dropped} prompts are longer than {config.max_prompt_tokens} tokens"
        )
    return prompts, dropped


def _tokenise(row: Row, tokenizer: Any, config: DataSection) -> tuple[str, list[int]]:
    value = row["prompt"]
    messages = [{"role": "user", "content": value}] if config.chat and isinstance(value, str) else value
    if isinstance(messages, str):
        token_ids = tokenizer(messages, add_special_tokens=True)["input_ids"]
        text = messages
    elif isinstance(messages, list):
        if getattr(tokenizer, "chat_template", None) is None:
            raise DataError(
                f"{row.place}: the prompt is a list of chat messages, but the tokenizer has no chat template; use "
                "a chat model's tokenizer, or give plain text with data.chat=false"
            )
        if config.system_prompt is not None:
            messages = [{"role": "system", "content": config.system_prompt}, *messages]
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
