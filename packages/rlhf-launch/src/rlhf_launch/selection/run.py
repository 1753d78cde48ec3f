"""From a file of scored answers to a file that offline methods train on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_algos import (
    DataSource,
    SelectionConfig,
    SelectionReport,
    load_config,
    naming_full_disk,
    read_answers,
    select,
    to_plain,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    select: SelectionConfig


def read_rule(kind: str, settings: Sequence[str] = ()) -> SelectionConfig:
    """The rule of a kind with its settings, as `key=value`.

    Raises:
        ConfigError: there is no such rule or setting.
    """
    given = [f"select.{setting}" for setting in settings]
    return load_config(_Rule, None, [f"select.kind={kind}", *given]).select


def select_answers(
    samples: DataSource | str, output: Path, config: SelectionConfig, *, seed: int = 0
) -> SelectionReport:
    """Choose among scored answers, and write the rows and, beside them, `<name>.report.json`.

    Both files are there whole or not at all, and the same for the same samples, rule and seed.

    Args:
        samples: what `rlhf generate` or `rlhf score` wrote.
        output: the JSONL file.
        config: the rule.
        seed: of what is drawn.

    Raises:
        UserError: a row of something else, samples without scores, or nothing chosen.
        ResourceError: the disk is full, or the output cannot be written.
    """
    selection = select(read_answers(samples), config, seed=seed)
    about = {"rule": to_plain(config), "seed": seed, **asdict(selection.report)}
    with naming_full_disk(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in selection.rows]
        write_whole(output, "".join(lines))
        write_whole(output.with_name(output.name + ".report.json"), as_json(about))
    return selection.report


def as_json(content: Any) -> str:
    """Text of a file."""
    return json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n"


def write_whole(path: Path, text: str) -> None:
    """A file that is there whole or not at all: written beside its place, flushed to the disk, then renamed."""
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
