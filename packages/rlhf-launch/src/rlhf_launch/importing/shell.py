"""Command lines out of shell scripts, without running anything.

Read are line continuations, comments, assignments, arrays, here-documents read into a variable, `${name:-default}`
and whole-number arithmetic. Branches are not decided: what an `if` assigns counts only where the variable has no
value yet. `$(...)` stays as it is written.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core import ConfigError

_HEREDOC = re.compile(r"read\b[^\n]*?\s(?P<name>\w+)\s*<<-?\s*['\"]?(?P<end>\w+)['\"]?\s*$")
_ARRAY = re.compile(r"^\s*(?:export\s+|readonly\s+|local\s+|declare\s+(?:-\w+\s+)*)?(?P<name>\w+)=\((?P<body>.*)$")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|readonly\s+|local\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)$", re.DOTALL)
_VARIABLE = re.compile(
    r"\$\(\((?P<sum>(?:[^()]|\([^()]*\))*)\)\)"
    r"|\$\{(?P<braced>\w+)(?:\[[@*]\])?(?::?-(?P<otherwise>[^}]*))?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*)|(?P<arguments>\"?\$[@*]\"?)"
)
_END = re.compile(r"^(?:&&|\|\|?|;|&|&?>>?.*|\d>.*|<.*)$")
_OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


def command_lines(text: str, marker: str, variables: Mapping[str, str] | None = None) -> list[list[str]]:
    """The arguments of every command of a script in which a word begins with `marker`, that word first.

    >>> command_lines("N=2\\npython3 -m tool.run --size $N \\\\\\n  --fast", "tool.")
    [['tool.run', '--size', '2', '--fast']]

    Args:
        text: a script, or a single command line.
        marker: how a command is recognised: `openrlhf.cli.`, `verl.trainer.`.
        variables: values from outside, such as the environment.

    Raises:
        ConfigError: a quote is not closed.
    """
    known = dict(variables or {})
    found: list[list[str]] = []
    for statement in _statements(text, known):
        if re.match(r"\s*echo\b", statement):
            continue
        found += _commands(_expanded(statement, known), marker)
    if not found:  # the command is put together in a variable and run in a way that is not understood
        for value in known.values():
            found += _commands(value, marker) if marker in value else []
    return found


def _statements(text: str, known: dict[str, str]) -> Iterator[str]:
    """The lines of a script that assign nothing, in order; assignments go into `known` on the way."""
    lines = iter(_joined(text))
    depth = 0
    for line in lines:
        stripped = line.strip()
        depth += len(re.findall(r"(?:^|;\s*)if\b", stripped)) - len(re.findall(r"(?:^|;\s*)fi\b", stripped))
        if match := _HEREDOC.search(line):
            body: list[str] = []
            for inner in lines:
                if inner.strip() == match["end"]:
                    break
                body.append(inner)
            known[match["name"]] = " ".join(_expanded(part, known) for part in body)
            continue
        if match := _ARRAY.match(line):
            parts = [match["body"]]
            while not parts[-1].rstrip().endswith(")"):
                following = next(lines, None)
                if following is None:
                    raise ConfigError(f"the array {match['name']} is not closed with ')'")
                parts.append(following)
            known[match["name"]] = _expanded(" ".join(parts).rstrip().removesuffix(")"), known)
            continue
        match = _ASSIGNMENT.match(line)
        if match and len(words := _words(_expanded(match["value"], known), joined=True)) <= 1:
            if depth == 0 or match["name"] not in known:
                known[match["name"]] = words[0] if words else ""
            continue
        yield line


def _joined(text: str) -> list[str]:
    """The lines without comments, continued ones as one."""
    kept = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    lines: list[str] = []
    running = ""
    for line in kept:
        line = _without_comment(line.rstrip("\r"))
        continued = line.rstrip().endswith("\\")
        running += line.rstrip()[:-1] if continued else line
        # A line that opens a quote goes on until the quote is closed.
        if continued or _opens_quote(running):
            running += "" if continued else "\n"
            continue
        lines.append(running)
        running = ""
    return [*lines, running] if running.strip() else lines


def _without_comment(line: str) -> str:
    quote = ""
    for place, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote and line[place - 1] != "\\" else quote
        elif letter in "'\"" and (place == 0 or line[place - 1] != "\\"):
            quote = letter
        elif letter == "#" and place and line[place - 1].isspace():
            return line[:place]
    return line


def _opens_quote(line: str) -> bool:
    try:
        shlex.split(line, posix=True)
    except ValueError as error:
        return "quotation" in str(error)
    return False


def _expanded(text: str, known: Mapping[str, str]) -> str:
    """The text with the variables that are known; others stay as they are written."""

    def value(match: re.Match[str]) -> str:
        if match["arguments"]:
            return ""
        if match["sum"] is not None:
            number = _arithmetic(match["sum"], known)
            return match[0] if number is None else str(number)
        name = match["braced"] or match["plain"]
        if name in known:
            return known[name]
        return match[0] if match["otherwise"] is None else match["otherwise"]

    return _VARIABLE.sub(value, text)


def _arithmetic(text: str, known: Mapping[str, str]) -> int | None:
    """The value of a shell sum of whole numbers; None where a part of it is not known."""
    plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: known.get(match[1], match[1]), _expanded(text, known))

    def number(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](number(node.left), number(node.right))
        if isinstance(node, ast.UnaryOp):
            return _OPERATORS[type(node.op)](number(node.operand))
        raise ValueError(ast.dump(node))

    try:
        return number(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None


def _words(text: str, *, joined: bool = False) -> list[str]:
    try:
        return shlex.split(text, posix=True)
    except ValueError as error:
        if joined:
            return [text]
        raise ConfigError(f"the command line cannot be taken apart ({error}): {text.strip()[:80]!r}") from error


def _commands(text: str, marker: str) -> Iterator[list[str]]:
    if marker not in text:
        return
    words = _words(text)
    for place, word in enumerate(words):
        if word.startswith(marker):
            command: list[str] = []
            for argument in words[place:]:
                if _END.match(argument):
                    break
                # `value;` ends a command, too
                command.append(argument.removesuffix(";"))
                if argument.endswith(";"):
                    break
            yield command
        elif marker in word and " " in word:  # a command within `bash -c "..."`
            yield from _commands(word, marker)
