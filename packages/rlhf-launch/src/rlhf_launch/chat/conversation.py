"""What was said so far, and how a model reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf_core import ConfigError, DataError


class Conversation:
    """Turns between a user and a model: chat messages where there is a chat template, else one growing text."""

    def __init__(self, tokenizer: Any, *, system: str | None = None) -> None:
        """`system` is the system prompt, for chat models alone.

        Raises:
            ConfigError: a system prompt for a model without a chat template.
        """
        self._tokenizer = tokenizer
        self.is_chat = bool(tokenizer.chat_template)
        self._system: str | None = None
        self._turns: list[tuple[str, str]] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text and not self.is_chat:
            raise ConfigError(
                "the model has no chat template, so no place for a system prompt; write it into the text"
            )
        self._system = text or None

    @property
    def turns(self) -> int:
        """Replies so far."""
        return len(self._turns)

    def add(self, said: str, reply: str) -> None:
        """Note a finished turn."""
        self._turns.append((said, reply))

    def undo(self) -> bool:
        """Take the last turn back; whether there was one."""
        return bool(self._turns) and self._turns.pop() is not None

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self._turns.clear()

    def token_ids(self, said: str) -> list[int]:
        """What the model reads when the user says this next.

        Raises:
            DataError: the chat template does not take the messages, or nothing was said.
        """
        if not self.is_chat:
            ids = list(self._tokenizer(self._text() + said)["input_ids"])
        else:
            messages = [*self.messages(), {"role": "user", "content": said}]
            try:
                text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a template is a program, of whose errors nothing is known
                raise DataError(f"the chat template does not take this: {type(error).__name__}: {error}") from None
            ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise DataError("there is nothing to begin from; write something")
        return ids

    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat messages."""
        found = [{"role": "system", "content": self._system}] if self._system else []
        for said, reply in self._turns:
            found += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
        return found

    def save(self, file: Path) -> None:
        """Append the conversation to a JSONL file, as a row that `rlhf offline sft` reads.

        Raises:
            DataError: nothing was said yet, or the file cannot be written.
        """
        if not self._turns:
            raise DataError("nothing was said yet")
        row = {"messages": self.messages()} if self.is_chat else {"text": self._text()}
        try:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise DataError(f"{str(file)!r} cannot be written: {error.strerror}") from error

    def _text(self) -> str:
        return "".join(said + reply for said, reply in self._turns)
