"""From what an environment says to tokens: each thing once, and never what the policy has sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core import ConfigError, DataError, Observation

_SAMPLED = "(a turn that was sampled)"


class TurnTokens:
    """Tokenises observations with a tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def opening(self, prompt_token_ids: Sequence[int], observation: Observation) -> list[int]:
        """The tokens before the first turn: the row's prompt and what `reset` said.

        Raises:
            DataError: there is nothing at all, or the chat template refuses the messages.
        """
        if observation.messages:
            tokens = self._tokenise(self._render(observation.messages, observation.tools))
        else:
            tokens = [*prompt_token_ids, *observation.token_ids, *self._tokenise(observation.text)]
        if not tokens:
            raise DataError("an episode starts with nothing: give the row a prompt, or say something in `reset`")
        return tokens

    def reply(self, observation: Observation, last_token_id: int) -> list[int]:
        """The tokens between a sampled turn that ended with `last_token_id` and the next one."""
        if not observation.messages:
            return [*observation.token_ids, *self._tokenise(observation.text)]
        tokens = self._tokenise(self._following(observation.messages))
        # The template closes the turn; mostly the policy has said that token itself.
        return tokens[1:] if tokens and tokens[0] == last_token_id else tokens

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of a turn, with or without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def _following(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the template writes between a turn's content and the next turn.

        The turn itself is a stand-in, because templates change what they are shown (they trim it, or drop its
        reasoning once there is more), and the policy must go on from its own tokens.
        """
        stand_in = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAMPLED}]
        text = self._render([*stand_in, *messages], ())
        _, found, following = text.rpartition(_SAMPLED)
        if not found:
            raise ConfigError(
                "the chat template does not show an assistant's content as it is, so turns cannot be continued; "
                "let the environment say `text` or `token_ids`"
            )
        return following

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "an environment says chat messages, but the tokenizer has no chat template; use a chat model's "
                "tokenizer, or let the environment say `text` or `token_ids`"
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # jinja2's errors, and what templates raise for roles they do not know
            raise DataError(f"the chat template refuses messages: {type(error).__name__}: {error}") from error

    def _tokenise(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
