"""What an environment says as tokens, cut to the room that there is before it is tokenised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhf_core import ConfigError, DataError, Observation

from rlhf_rollout.agents.environment_calls import EnvironmentFailed
from rlhf_rollout.chat.tokens import ChatTokens

_INLINE = 2_000
"""Characters, or tokens, that are worked on at once; what is larger is worked on in a thread."""
_PER_TOKEN = 4
"""Characters of a token, about."""
_MOST_PER_TOKEN = 16
"""Characters of a token in text whose tokens are long: contents of messages are cut to so many at once."""
_TRIES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """An observation as tokens."""

    token_ids: list[int]
    cut: bool = False
    """Whether something of it was left out, for want of room."""


class TurnTokens:
    """What an environment says as tokens, by a tokenizer and, for messages, its chat template.

    Every observation is tokenised once; what the policy has sampled never is. What is longer than a `limit` is cut:
    text and the contents of messages at their ends, first by characters, so that no more is tokenised than can fit.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def opening(self, prompt_token_ids: Sequence[int], observation: Observation, limit: int | None = None) -> Said:
        """The tokens before the first turn: the row's prompt and what `reset` said.

        Args:
            prompt_token_ids: the row's prompt, which is never cut.
            observation: what `reset` said.
            limit: tokens of the observation, and of both together.

        Raises:
            DataError: there is neither a prompt nor an observation, the chat template refuses the messages, or they
                have no room.
            ConfigError: messages without a chat template.
        """
        if observation.messages:
            said = self._fitting(observation, lambda m: self._chat.prompt(m, observation.tools), limit)
        else:
            room = None if limit is None else max(0, limit - len(prompt_token_ids))
            said = self._said(observation, room)
            said = Said(token_ids=[*prompt_token_ids, *said.token_ids], cut=said.cut)
        if not said.token_ids:
            raise DataError("an episode starts with nothing: give the row a prompt, or say something in `reset`")
        return said

    def reply(self, observation: Observation, last_token_id: int, limit: int | None = None) -> Said:
        """The tokens between a sampled turn that ended with `last_token_id` and the next one; see `opening`."""
        if observation.messages:
            return self._fitting(
                observation, lambda messages: self._chat.reply(messages, last_token_id=last_token_id), limit
            )
        return self._said(observation, limit)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of a turn, with or without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def _said(self, observation: Observation, limit: int | None) -> Said:
        """The observation's own tokens, or those of its plain text."""
        if not observation.text:
            given = observation.token_ids
            kept = list(given if limit is None else given[:limit])
            if wrong := [token for token in kept if not 0 <= token < self._vocabulary]:
                raise DataError(
                    f"an observation has the token id {wrong[0]}; the tokenizer has 0 to {self._vocabulary - 1}"
                )
            return self._checked(observation, Said(token_ids=kept, cut=len(kept) < len(given)))
        found, cut = self._of_text(observation.text, limit)
        return self._checked(observation, Said(token_ids=found, cut=cut))

    def _of_text(self, text: str, limit: int | None) -> tuple[list[int], bool]:
        """The first `limit` tokens of a text, and whether there are more. Little more than these is tokenised."""
        characters = len(text) if limit is None else min(len(text), _PER_TOKEN * (limit + 1))
        while True:
            found = list(self.tokenizer(text[:characters], add_special_tokens=False)["input_ids"])
            if limit is None or len(found) > limit or characters == len(text):
                return found[:limit], characters < len(text) or (limit is not None and len(found) > limit)
            characters = min(len(text), 2 * characters)

    def _fitting(
        self,
        observation: Observation,
        tokens_of: Callable[[Sequence[Mapping[str, Any]]], Sequence[int]],
        limit: int | None,
    ) -> Said:
        """The messages as tokens, with contents as long as there is room for."""
        messages = observation.messages
        total = sum(map(_characters, messages))
        characters = total if limit is None else min(total, (limit + 1) * _MOST_PER_TOKEN)
        for _ in range(_TRIES):
            found = tokens_of(messages if characters == total else _cut(messages, characters))
            if limit is None or len(found) <= limit:
                return self._checked(observation, Said(token_ids=list(found), cut=characters < total))
            if not characters:
                break
            characters = characters * limit * 9 // (len(found) * 10)
        raise DataError(f"the messages need {len(found)} tokens without their contents; there is room for {limit}")

    def _checked(self, observation: Observation, said: Said) -> Said:
        if said.cut and observation.images:
            raise DataError(
                "an observation with images does not fit; its images and their places in the text cannot be cut"
            )
        return said

    @cached_property
    def _vocabulary(self) -> int:
        return len(self.tokenizer)

    @cached_property
    def _chat(self) -> ChatTokens:
        """The chat template's tokens; needed only where an environment says messages."""
        try:
            return ChatTokens(self.tokenizer)
        except ConfigError as error:
            raise ConfigError(
                f"an environment says chat messages, but {error}; or let the environment say `text` or `token_ids`"
            ) from None


async def tokens_beside(call: Callable[..., Any], observation: Observation, *arguments: Any) -> Any:
    """Call what tokenises an observation, in a thread if that may take long.

    Raises:
        EnvironmentFailed: the observation cannot become tokens.
        ConfigError: the tokenizer has no chat template.
    """
    try:
        return await beside(_size(observation), call, *arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise EnvironmentFailed(f"what it said cannot become tokens: {error}") from error


async def beside(size: int, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on something of this size, in a thread if that may take long."""
    return call(*arguments) if size <= _INLINE else await asyncio.to_thread(call, *arguments)


def _size(observation: Observation) -> int:
    said = len(observation.text) + len(observation.token_ids)
    return said + sum(map(_characters, observation.messages)) + _INLINE * bool(observation.tools)


def _characters(message: Any) -> int:
    """Characters of a message's content that can be cut."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list | tuple) else ()
    return sum(len(text) for part in parts if isinstance(text := _text(part), str))


def _text(part: Any) -> Any:
    return part.get("text") if isinstance(part, Mapping) else None


def _cut(messages: Sequence[Any], characters: int) -> list[Any]:
    """The messages with so many characters of content at most: the longest contents are cut, to one length."""
    lengths = sorted(map(_characters, messages))
    left, most = characters, 0
    for place, length in enumerate(lengths):
        most = left // (len(lengths) - place)
        if length > most:
            break
        left -= length
    return [_shortened(message, most) if _characters(message) > most else message for message in messages]


def _shortened(message: Mapping[str, Any], most: int) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content[:most]}
    parts = []
    for part in content:
        if isinstance(text := _text(part), str):
            parts.append({**part, "text": text[:most]})
            most -= min(most, len(text))
        else:
            parts.append(part)
    return {**message, "content": parts}
