"""Chat messages to token ids, by the tokenizer's template; what was sampled before is never tokenised again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core import ConfigError, DataError

Message = Mapping[str, Any]


class ConversationTokens:
    """Renders messages with a chat template and tokenises either all of it or only what follows a sampled turn.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "the tokenizer has no chat template, so messages cannot become tokens; use a chat model's tokenizer"
            )
        self.tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[int, ...]:
        """Token ids of a whole conversation, ready for the assistant's next turn."""
        return self._tokenise(self._render(messages, tools, generation=True))

    def continuation(
        self, messages: Sequence[Message], tools: Sequence[Any], *, turn: int, last_token_id: int | None
    ) -> tuple[int, ...] | None:
        """Token ids that lead from a sampled turn, `messages[turn]`, to the assistant's next turn.

        Args:
            messages: the conversation; those after `turn` are new.
            tools: tool definitions that the template shows.
            turn: index of an assistant message whose tokens are known.
            last_token_id: the last of these tokens: the template's end of the turn is added if it is another.

        Returns None where the template writes the past differently once there is more (some drop old reasoning):
        then no continuation gives what the template would.
        """
        before = self._render(messages[:turn], tools, generation=True)
        upto = self._render(messages[: turn + 1], tools)
        whole = self._render(messages, tools, generation=True)
        if not upto.startswith(before) or not whole.startswith(upto):
            return None
        return self._tokenise(self._closing(upto[len(before) :], last_token_id) + whole[len(upto) :])

    def _closing(self, turn: str, last_token_id: int | None) -> str:
        """What the template puts behind the content of a rendered turn and the model has not said itself."""
        end = self.tokenizer.eos_token
        _, mark, tail = turn.rpartition(end) if end else ("", "", "")
        return tail if last_token_id == self.tokenizer.eos_token_id else mark + tail

    def _render(self, messages: Sequence[Message], tools: Sequence[Any], *, generation: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                template_messages(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except Exception as error:  # jinja2 errors, and whatever a template raises on roles it does not know
            raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def _tokenise(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


def plain_message(message: Message) -> dict[str, Any]:
    """A message without what does not matter: empty fields, and text in parts instead of a string.

    >>> plain_message({"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None})
    {'role': 'user', 'content': 'hi'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"a message must be an object with a `role`, got {str(message)[:80]!r}")
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise DataError(
                "only text can be in a message's `content`, given as a string or as parts of type `text`"
            )
        content = "".join(part["text"] for part in content)
    plain = {"role": message["role"], "content": content}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": dict(call["function"])} for call in calls
        ]
    return plain | {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: arguments of tool calls as objects, not as JSON in a string."""
    made = []
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
                for call in calls
            ]
        made.append(message)
    return made


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return arguments


def digests(messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[str]:
    """For each message a hash of the tools and of all messages up to it, itself included."""
    running = hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode())
    found = []
    for message in messages:
        running.update(json.dumps(message, sort_keys=True).encode() + b"\n")
        found.append(running.copy().hexdigest())
    return found
