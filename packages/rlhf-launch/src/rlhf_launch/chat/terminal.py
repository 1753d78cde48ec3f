"""Lines in, replies out, and the commands between them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from rlhf_core import DataError, SamplingConfig, UserError

from rlhf_launch.chat.conversation import Conversation
from rlhf_launch.chat.speaker import Speaker

COMMANDS = """/undo           take the last turn back
/reset          begin anew; the system prompt stays
/system TEXT    another system prompt; without TEXT none
/save FILE      append the conversation to a JSONL file, as a row for `rlhf offline sft`
/help           these lines
/exit           end (also Ctrl-D)
A line that begins with // is said with one slash; one that ends with \\ goes on in the next.
Ctrl-C stops a reply."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Chat:
    """A conversation with one user. Replies go to `out`, everything else to `notes`."""

    def __init__(
        self, speaker: Speaker, sampling: SamplingConfig, *, system: str | None, out: TextIO, notes: TextIO
    ) -> None:
        """See Conversation for `system`.

        Raises:
            ConfigError: a system prompt for a model without a chat template.
        """
        self._speaker, self._sampling = speaker, sampling
        self._conversation = Conversation(speaker.tokenizer, system=system)
        self._out, self._notes = out, notes
        self._commands: dict[str, Callable[[str], None]] = {
            "/undo": self._undo,
            "/reset": self._reset,
            "/system": self._system,
            "/save": self._save,
            "/help": lambda _: self._note(COMMANDS),
        }

    def run(self, lines: Iterator[str]) -> None:
        """Talk until the lines end, or /exit."""
        if not self._conversation.is_chat:
            self._note(
                "the model has no chat template: it goes on with the text, and what you write comes behind what is "
                "there (/reset begins anew)"
            )
        for line in lines:
            command, _, rest = line.partition(" ")
            if command in ("/exit", "/quit"):
                return
            try:
                if line.startswith("/") and not line.startswith("//"):
                    self._command(command)(rest.strip())
                elif line.strip():
                    self._say(line.removeprefix("/") if line.startswith("//") else line)
            except UserError as error:
                self._note(str(error))

    def _say(self, said: str) -> None:
        reply = self._speaker.reply(self._conversation.token_ids(said), self._sampling)
        try:
            for piece in reply:
                # What a model writes must not move the cursor, or more, of whoever reads it.
                self._out.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", piece))
                self._out.flush()
        except KeyboardInterrupt:
            reply.stop()
            self._note("(stopped)")
        self._out.write("\n")
        self._out.flush()
        if reply.cut:
            self._note("(cut off: no more tokens; --max-tokens)")
        self._conversation.add(said, reply.text)

    def _command(self, name: str) -> Callable[[str], None]:
        if name not in self._commands:
            raise DataError(
                f"there is no command {name}; /help lists them, // says a line that begins with a slash"
            )
        return self._commands[name]

    def _undo(self, _: str) -> None:
        if not self._conversation.undo():
            raise DataError("there is no turn to take back")
        self._note(f"took the last turn back; {self._conversation.turns} left")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._note("begun anew")

    def _system(self, text: str) -> None:
        self._conversation.system = text
        self._note(f"system prompt: {text}" if text else "no system prompt")

    def _save(self, name: str) -> None:
        if not name:
            raise DataError("write /save FILE")
        self._conversation.save(Path(name).expanduser())
        self._note(f"appended to {name}")

    def _note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)


def lines_of(source: TextIO, *, prompt: str = "> ") -> Iterator[str]:
    """Lines of a user, those that end with a backslash joined with the next. A terminal is prompted."""
    held: list[str] = []
    while (line := _line(source, prompt if not held else ". ")) is not None:
        if line.endswith("\\"):
            held.append(line[:-1])
            continue
        yield "\n".join([*held, line])
        held = []
    if held:
        yield "\n".join(held)


def _line(source: TextIO, prompt: str) -> str | None:
    if source is sys.stdin and source.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (arrows and history)
        try:
            return input(prompt)
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return None
    line = source.readline()
    return line.rstrip("\r\n") if line else None
