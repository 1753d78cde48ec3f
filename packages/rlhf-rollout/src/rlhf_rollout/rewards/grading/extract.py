"""The program in a response: what stands between fences."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

_FENCE = re.compile(r"^(?P<indent>[^\S\n]*(?:>[^\S\n]?)?)(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)$")

PYTHON = ("python", "python3", "py", "py3", "python2.7", "ipython")


def extract_code(text: str, languages: Sequence[str] = PYTHON) -> str:
    """The last fenced block in one of the languages; else the last without one, or of another; else the text.

    Fences are of backticks or tildes, may be indented, and the last may lack its end.

    >>> extract_code("So:\\n```python3\\nprint(1)\\n```\\nIt prints\\n```\\n1\\n```"), extract_code("print(2)")
    ('print(1)\\n', 'print(2)')
    """
    blocks = fenced_blocks(text)
    wanted = [code for language, code in blocks if language in languages]
    plain = [code for language, code in blocks if not language]
    return (wanted or plain or [code for _, code in blocks] or [text])[-1]


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Language (lower case, empty where none is said) and content of every fenced block, in order."""
    found: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if opened is None:
            # Backticks after the fence are inline code, not the start of a block.
            if mark is not None and not (mark["fence"][0] == "`" and "`" in mark["info"]):
                opened, lines = mark, []
        elif mark is not None and mark["fence"].startswith(opened["fence"]) and not mark["info"].strip():
            found.append(_block(opened, lines))
            opened = None
        else:
            lines.append(line)
    if opened is not None and any(line.strip() for line in lines):
        found.append(_block(opened, lines))
    return found


def _block(opened: re.Match[str], lines: list[str]) -> tuple[str, str]:
    words = opened["info"].strip().strip("{}").lower().replace(",", " ").split()
    indent = opened["indent"]
    if indent and all(line.startswith(indent) or not line.strip() for line in lines):
        lines = [line[len(indent) :] for line in lines]
    code = "".join(f"{line}\n" for line in lines)
    return (words[0].lstrip(".") if words else ""), textwrap.dedent(code) if indent else code
