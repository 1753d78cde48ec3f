"""From what an environment says to tokens: each thing once, and never what the policy has sampled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rlhf_core import ConfigError, DataError, Observation

from rlhf_rollout.chat.tokens import ChatTokens


class TurnTokens:
    """Tokenises observations with a tokenizer and, if they are messages, its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def opening(self, prompt_token_ids: Sequence[int], observation: Observation) -> list[int]:
        """The tokens before the first turn: the row's prompt and what `reset` said.

        Raises:
            DataError: there is nothing at all, or the chat template refuses the messages.
        """
        if observation.messages:
            tokens = list(self._chat.prompt(observation.messages, observation.tools))
        else:
            tokens = [*prompt_token_ids, *self._said(observation)]
        if not tokens:
            raise DataError("an episode starts with nothing: give the row a prompt, or say something in `reset`")
        return tokens

    def reply(self, observation: Observation, last_token_id: int) -> list[int]:
        """The tokens between a sampled turn that ended with `last_token_id` and the next one."""
        if observation.messages:
            return list(self._chat.reply(observation.messages, last_token_id=last_token_id))
        return self._said(observation)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of a turn, with or without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def _said(self, observation: Observation) -> list[int]:
        """Tokens as they are, or those of plain text."""
        if not observation.text:
            return list(observation.token_ids)
        return list(self.tokenizer(observation.text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _chat(self) -> ChatTokens:
        """Only needed where an environment says messages."""
        try:
            return ChatTokens(self.tokenizer)
        except ConfigError as error:
            raise ConfigError(
                f"an environment says chat messages, but {error}; or let it say `text` or `token_ids`"
            ) from None
