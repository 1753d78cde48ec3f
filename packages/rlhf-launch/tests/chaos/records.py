"""What a campaign records of each kill and of each run, and its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

How = Literal["all", "command", "SIGTERM"]
"""Who is killed: every process of the run, the process of the command alone, or that one by SIGTERM."""


@dataclass(kw_only=True, slots=True)
class Kill:
    """One kill, and what was seen of it."""

    form: str
    life: int
    how: How
    asked: str
    """The phase that was waited for."""
    phase: str
    """The phase that was hit."""
    step: int
    """Steps in `metrics.jsonl` at that moment."""
    seconds: float
    """Since the start of the command."""
    until_gone_s: float | None = None
    """How long what the command had started lived on; None where it was killed, too."""
    stayed: list[str] = field(default_factory=list)
    """Processes that were still there after a minute, and were then killed."""
    exit_code: int | None = None


@dataclass(kw_only=True, slots=True)
class Life:
    """A run from its first start to its end, over all kills."""

    form: str
    life: int
    kills: list[Kill] = field(default_factory=list)
    resumes: int = 0
    begun_anew: int = 0
    differences: list[str] = field(default_factory=list)
    """From the uninterrupted run."""
    faults: list[str] = field(default_factory=list)
    """Of the account, and of restarts that failed."""
    left: list[str] = field(default_factory=list)
    """Processes, shared memory and temporary folders after the end."""
    seconds: float = 0.0


def report(lives: Sequence[Life]) -> str:
    """What a campaign found, as text."""
    kills = [kill for life in lives for kill in life.kills]
    names = sorted({kill.form for kill in kills})
    wrong = sum(bool(life.differences) for life in lives), sum(bool(life.faults) for life in lives)
    lines = [
        f"{len(kills)} kills in {len(lives)} runs, {sum(life.resumes for life in lives)} resumes, "
        f"{sum(life.begun_anew for life in lives)} begun anew",
        f"runs with a differing bit: {wrong[0]}; with a lost or doubled prompt or a failed start: {wrong[1]}",
        "| phase | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for phase in dict.fromkeys(kill.phase for kill in kills):
        counts = [sum(kill.phase == phase and kill.form == name for kill in kills) for name in names]
        lines.append(f"| {phase} | " + " | ".join(map(str, counts)) + " |")
    for how in ("command", "SIGTERM"):
        waits = [kill.until_gone_s for kill in kills if kill.how == how and kill.until_gone_s is not None]
        if waits:
            lines.append(f"{how}: what it had started was gone after {min(waits):.1f} to {max(waits):.1f} s")
    for life in lives:
        for what, found in (("differs", life.differences), ("fault", life.faults), ("left", life.left)):
            lines += [f"{life.form} {life.life}: {what}: {line}" for line in found]
        lines += [f"{life.form} {life.life}: stayed: {kill.stayed}" for kill in life.kills if kill.stayed]
    return "\n".join(lines)


def write_life(life: Life, path: Path) -> None:
    """Add a run to a file of results, a JSON line each."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(life)) + "\n")


def read_lives(path: Path) -> list[Life]:
    """The runs of a file of results."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [Life(**{**row, "kills": [Kill(**kill) for kill in row["kills"]]}) for row in rows]
