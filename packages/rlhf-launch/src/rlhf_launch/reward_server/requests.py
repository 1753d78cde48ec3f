"""Requests as texts, and texts as the tokens that a reward model reads.

Two forms of a body: that of `rlhf_rollout.HTTPReward`

    {"prompts": [...], "completions": [...], "sample_ids": [...], "columns": {...}}   ->   {"scores": [...]}

and that of OpenRLHF's `remote_rm_url`

    {"query": [...], "prompts": [...], "labels": [...]}                               ->   {"rewards": [...]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core import DataError

_MOST_ROWS = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a request wants scored."""

    pairs: Sequence[tuple[Any, str]]
    """Prompt (text, or chat messages) and response. Of a query that is one text, the prompt is empty."""
    answer: Literal["scores", "rewards"]
    """The key that the client reads."""


def parse(body: bytes) -> Asked:
    """Read a request.

    Raises:
        DataError: it is not JSON, or has neither form; a sentence for the client.
    """
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise DataError("the request is nested too deeply") from None
    except UnicodeEncodeError:
        raise DataError(
            "the request has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
        ) from None
    except ValueError as error:
        raise DataError(f"the request is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"the request must be a JSON object, got {_kind(found)}")
    if "completions" in found:
        completions, prompts = _rows(found, "completions"), _rows(found, "prompts")
        if len(completions) != len(prompts):
            raise DataError(f"there are {len(prompts)} prompts and {len(completions)} completions; give one each")
        for number, text in enumerate(completions):
            if not isinstance(text, str):
                raise DataError(f"completions[{number}] must be a text, got {_kind(text)}")
        pairs = [
            (_prompt(p, f"prompts[{n}]"), c) for n, (p, c) in enumerate(zip(prompts, completions, strict=True))
        ]
        return Asked(pairs=pairs, answer="scores")
    if "query" in found:
        given = found["query"]
        rows = [given] if isinstance(given, str) else _rows(found, "query")
        return Asked(pairs=[_query(row, f"query[{n}]") for n, row in enumerate(rows)], answer="rewards")
    names = ", ".join(repr(str(name)[:40]) for name in list(found)[:8]) or "nothing"
    raise DataError(f"the request must have 'prompts' and 'completions', or 'query'; it has {names}")


class RowEncoder:
    """Texts as token ids, as a run's own reward model would get them (`reward.model`)."""

    def __init__(self, tokenizer: Any, *, max_length: int) -> None:
        """`max_length` is the longest row that the model takes, in tokens."""
        self._tokenizer = tokenizer
        self._max_length = max_length
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = {*map(str, tokenizer.all_special_tokens), *added}
        self._end = str(tokenizer.eos_token or "")
        self._pad = str(tokenizer.pad_token or "")

    def rows(self, asked: Asked) -> list[list[int]]:
        """Token ids of each pair.

        Raises:
            DataError: a row is empty or too long, or the template does not take its messages.
        """
        return [self._row(prompt, text, number) for number, (prompt, text) in enumerate(asked.pairs)]

    def _row(self, prompt: Any, text: str, number: int) -> list[int]:
        tokens = self._tokens(self._rendered(prompt, number))
        if prompt == "" and self._pad:  # as clients that decode padded rows send them
            while text.startswith(self._pad):
                text = text.removeprefix(self._pad)
            while text.endswith(self._pad):
                text = text.removesuffix(self._pad)
        closed = text if self._end and text.endswith(self._end) else text + self._end
        # A query that is prompt and response in one: then this is all of it.
        tokens += self._tokens(closed) if prompt == "" else self._plain(closed)
        if not tokens:
            raise DataError(f"row {number} is empty")
        if len(tokens) > self._max_length:
            raise DataError(
                f"row {number} has {len(tokens)} tokens, the model takes {self._max_length} at most; shorten it"
            )
        return tokens

    def _rendered(self, prompt: Any, number: int) -> str:
        if isinstance(prompt, str):
            return prompt
        if not self._tokenizer.chat_template:
            raise DataError("the model's tokenizer has no chat template; send texts instead of messages")
        try:
            return self._tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program, of whose errors nothing is known
            raise DataError(
                f"row {number}: the chat template does not take these messages: {type(error).__name__}: {error}"
            ) from None

    def _tokens(self, text: str) -> list[int]:
        """The beginning of a row. A text with special tokens in it comes from a template, and needs no more."""
        rendered = any(token in text for token in self._special)
        if not text:
            return []
        return list(self._tokenizer(text, add_special_tokens=not rendered)["input_ids"])

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _rows(body: dict[str, Any], name: str) -> list[Any]:
    rows = body.get(name)
    if not isinstance(rows, list):
        raise DataError(f"{name!r} must be a list with one entry per sample, got {_kind(rows)}")
    if len(rows) > _MOST_ROWS:
        raise DataError(f"{name!r} has {len(rows)} entries, {_MOST_ROWS} at most are taken in one request")
    return rows


def _prompt(value: Any, place: str) -> Any:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        for message in value:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise DataError(
                    f"{place}: a message must be an object with 'role' and 'content', got {_kind(message)}"
                )
            if not isinstance(message.get("content"), str):
                raise DataError(
                    f"{place}: a message's 'content' must be a text, got {_kind(message.get('content'))}"
                )
        return value
    raise DataError(f"{place} must be a text or a list of chat messages, got {_kind(value)}")


def _query(value: Any, place: str) -> tuple[Any, str]:
    if isinstance(value, str):
        return "", value
    messages = _prompt(value, place)
    if not messages or messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise DataError(f"{place}: a conversation to be scored must end with a message of the assistant")
    return messages[:-1], messages[-1]["content"]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")
