"""Short names of models and data sets, for tables and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_core import ConfigError


def labels(names: Sequence[str]) -> list[str]:
    """A short label for each path or hub name, good as a file's name; the whole path where the last part is not
    enough.

    >>> labels(["runs/a", "runs/b/"]), labels(["a/model", "b/model"]), labels(["org/name", "data/test.jsonl"])
    (['a', 'b'], ['a-model', 'b-model'], ['name', 'test'])

    Raises:
        ConfigError: one is given twice.
    """
    parts = [[part for part in Path(name).parts if part not in ("/", ".", "..")] for name in names]
    ends = [Path(each[-1]) if each else Path("model") for each in parts]
    short = [end.stem if end.suffix in (".jsonl", ".json", ".parquet") else end.name for end in ends]
    found = [name if short.count(name) == 1 else "-".join(each) for name, each in zip(short, parts, strict=True)]
    for place, label in enumerate(found):
        if label in found[:place]:
            raise ConfigError(f"{names[place]!r} is given twice, or has the same name as another ({label!r})")
    return found
