"""Tables as plain lines, whole however narrow the terminal and also where the output is a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Rows of equally many cells as lines, their columns two spaces apart.

    >>> print(aligned([("metric", "p"), ("kl", "0.25")], right=[1]))
    metric     p
    kl      0.25

    Args:
        rows: the first may be the titles.
        right: columns that are aligned on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def written(options: Mapping[str, Any]) -> str:
    """Options in one line, as a configuration has them.

    >>> written({"max_num_seqs": 256, "async_scheduling": True, "quantization": None})
    'max_num_seqs=256 async_scheduling=true quantization=null'
    """
    plain = {True: "true", False: "false", None: "null"}
    return " ".join(
        f"{name}={plain[value] if value is None or isinstance(value, bool) else value}"
        for name, value in options.items()
    )
