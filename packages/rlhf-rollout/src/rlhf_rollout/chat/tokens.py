"""Chat messages to token ids, by the tokenizer's template; sampled turns are continued, never tokenised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rlhf_core import ConfigError, DataError, PackedInts

from rlhf_rollout.chat.images import Context, ImageTokens, image_parts
from rlhf_rollout.chat.messages import Message, template_messages

_SAMPLED = "(a turn that was sampled)"
_EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
_STAND_IN: tuple[Message, ...] = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _SAMPLED})


class ChatTokens:
    """Renders messages with a chat template and tokenises either all of it or only what follows a sampled turn.

    Args:
        tokenizer: the model's.
        processor: see `rlhf_core.load_processor`; messages may have images with it.

    Raises:
        ConfigError: the tokenizer has no chat template, or the processor cannot be used here.
    """

    def __init__(self, tokenizer: Any, processor: Any = None) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "the tokenizer has no chat template, so messages cannot become tokens; use a chat model's tokenizer"
            )
        self.tokenizer = tokenizer
        self.images = None if processor is None else ImageTokens(processor)
        """Tokens of messages with images; None where there can be none."""

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a whole conversation, ready for the assistant's next turn; `options` are the template's."""
        return self.tokenise(self._render(messages, tools, generation=True, options=options))

    def prompt_context(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Context:
        """The same as `prompt`, of messages that may have images."""
        return self._context(self._render(messages, tools, generation=True, options=options), messages)

    def reply(self, messages: Sequence[Message], *, last_token_id: int | None) -> tuple[int, ...]:
        """Token ids that lead from any sampled turn over new `messages` to the assistant's next turn.

        The turn itself is a stand-in, because templates change what they are shown (they trim it, or drop its
        reasoning once there is more), and the policy must go on from its own tokens.

        Args:
            messages: what was said since.
            last_token_id: the turn's last token; the template's end of the turn is left out where it is that.
        """
        return self.tokenise(self._unsaid(self._behind_stand_in(messages, generation=True), last_token_id))

    def continuation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        *,
        turn: int,
        last_token_id: int | None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...] | None:
        """Token ids that lead from a sampled turn, `messages[turn]`, to the assistant's next turn.

        Args:
            messages: the conversation; those after `turn` are new.
            tools: tool definitions that the template shows.
            turn: index of an assistant message whose tokens are known.
            last_token_id: as in `reply`.
            options: further variables of the template.

        Returns None where the template writes the past differently once there is more (some drop old reasoning), or
        ends this turn in a way of its own: then no continuation gives what the template would.
        """
        text = self._following(messages, tools, turn, last_token_id, options)
        return None if text is None else self.tokenise(text)

    def continuation_context(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        *,
        turn: int,
        last_token_id: int | None,
        options: Mapping[str, Any] | None = None,
    ) -> Context | None:
        """The same as `continuation`, of messages that may have images."""
        text = self._following(messages, tools, turn, last_token_id, options)
        return None if text is None else self._context(text, messages[turn + 1 :])

    def tokenise(self, text: str) -> tuple[int, ...]:
        """Token ids of text, without special tokens around it."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    def _context(self, text: str, messages: Sequence[Message]) -> Context:
        if self.images is None:
            return Context(token_ids=PackedInts(self.tokenise(text)))
        return self.images.context(text, [image for message in messages for image in image_parts(message)])

    def _following(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        turn: int,
        last_token_id: int | None,
        options: Mapping[str, Any] | None,
    ) -> str | None:
        """What the template writes between a sampled turn and the next one; see `continuation`."""
        before = self._render(messages[:turn], tools, generation=True, options=options)
        upto = self._render(messages[: turn + 1], tools, options=options)
        whole = self._render(messages, tools, generation=True, options=options)
        if not (upto.startswith(before) and upto.endswith(self._turn_end)):
            return None
        for past in (upto, _without_empty_thought(before, upto)):
            if whole.startswith(past):
                return self._unsaid(self._turn_end, last_token_id) + whole[len(past) :]
        return None

    @cached_property
    def _turn_end(self) -> str:
        """What the template writes behind the content of an assistant's turn."""
        return self._behind_stand_in((), generation=False)

    def _behind_stand_in(self, messages: Sequence[Message], *, generation: bool) -> str:
        text = self._render([*_STAND_IN, *messages], (), generation=generation)
        _, found, following = text.rpartition(_SAMPLED)
        if not found:
            raise ConfigError(
                "the chat template does not show an assistant's content as it is, so turns cannot be continued; "
                "use another template, or an environment that says `text` or `token_ids`"
            )
        return following

    def _unsaid(self, following: str, last_token_id: int | None) -> str:
        """What follows a turn, without the end of the turn if the model has said that itself."""
        rest = following.lstrip()
        if last_token_id is None or self.tokenise(rest)[:1] != (last_token_id,):
            return following
        said = self.tokenizer.decode([last_token_id])
        # An ordinary token may only be how the end of the turn begins.
        whole = last_token_id in self._marks or said == self._turn_end.strip()
        return rest[len(said) :] if whole and rest.startswith(said) else following

    @cached_property
    def _marks(self) -> frozenset[int]:
        """Tokens that are marks by themselves and no part of a text: special ones, and others that were added."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(self.tokenizer.all_special_ids) | frozenset(added)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        *,
        generation: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                template_messages(messages, in_parts=self.images is not None),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation,
                **(options or {}),
            )
        except Exception as error:  # jinja2's errors, and whatever a template raises on roles it does not know
            raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error


def _without_empty_thought(before: str, upto: str) -> str:
    """The text up to a turn as some templates write it once more follows: without the turn's empty thought.

    The policy has the empty thought behind it all the same, and nothing is lost to it.
    """
    start = len(before.removesuffix(_EMPTY_THOUGHT))
    return upto[:start] + upto[start:].removeprefix(_EMPTY_THOUGHT)
