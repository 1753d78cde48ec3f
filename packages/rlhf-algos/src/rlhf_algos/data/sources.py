"""Rows of a dataset with their places, so that an error can name the file and the row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from rlhf_core import ConfigError, DataError, nearest

from rlhf_algos.data.conversations import in_our_form


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """One dataset: where it is and what its columns are called."""

    short_form: ClassVar[str] = "path"

    path: str
    """A .jsonl, .json, .parquet or .csv file, a directory of these or of `save_to_disk`, or a hub name."""
    split: str = "train"
    """Split of a hub dataset or of a saved DatasetDict; plain files have one split only."""
    name: str | None = None
    """Configuration of a hub dataset."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column name -> the dataset's, for instance {prompt: question}."""
    only: tuple[str, ...] = ()
    """Read these columns (our names) alone, where a row could be read in two ways; empty for all."""
    weight: float | None = None
    """Relative probability of drawing from this dataset where several are mixed. Without weights every row of all
    of them comes once per pass; with weights, equal ones included, a dataset without one has weight 1."""
    limit: int | None = None
    """Read at most this many rows."""

    def __post_init__(self) -> None:
        if self.weight is not None and not (self.weight > 0 and math.isfinite(self.weight)):
            raise ConfigError(f"data: weight of {self.path!r} must be positive and finite, got {self.weight}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"data: limit of {self.path!r} must be at least 1, got {self.limit}")


def mixing_weights(sources: Sequence[DataSource], sizes: Sequence[int]) -> tuple[float, ...]:
    """How probable a draw from each dataset is, relative to the others: by size where no weight is written.

    >>> sources = [DataSource(path="a.jsonl", weight=0.5), DataSource(path="b.jsonl", weight=0.5)]
    >>> mixing_weights(sources, [90, 10]), mixing_weights([DataSource(path="a.jsonl")] * 2, [90, 10])
    ((0.5, 0.5), (90.0, 10.0))
    """
    if all(source.weight is None for source in sources):
        return tuple(float(size) for size in sizes)
    return tuple(1.0 if source.weight is None else source.weight for source in sources)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row and where it was found."""

    source: str
    """File or dataset."""
    number: int
    """Counted from 1: the line in a JSONL file, else the row."""
    values: Mapping[str, Any]

    @property
    def place(self) -> str:
        """For messages: `pairs.jsonl row 7`."""
        return f"{self.source} row {self.number}"

    def __getitem__(self, column: str) -> Any:
        return self.values[column]

    def __contains__(self, column: object) -> bool:
        return column in self.values


def read_rows(
    source: DataSource | str,
    *,
    required: Sequence[str] = (),
    check: Callable[[Row], str | None] | None = None,
) -> list[Row]:
    """All rows of a dataset, its columns renamed to ours.

    Args:
        source: the dataset; a plain string is a path or hub name with default settings.
        required: columns (our names) that every row must have.
        check: says what is wrong with a row, or None.

    Raises:
        DataError: a missing file, unreadable row, missing column or empty dataset, with file and row.
    """
    source = DataSource(path=source) if isinstance(source, str) else source
    rows = list(islice(_renamed(source), source.limit))
    if not rows:
        raise DataError(f"{source.path} holds no rows; give a dataset with at least one")
    for row in rows:
        for column in required:
            if column not in row:
                raise DataError(_missing(row, column, source))
        if check is not None and (problem := check(row)):
            raise DataError(f"{row.place}: {problem}")
    return rows


def _missing(row: Row, column: str, source: DataSource) -> str:
    theirs = source.columns.get(column, column)
    other = nearest(theirs, row.values) or next(iter(row.values), "its_name")
    return (
        f"{row.place} has no column {theirs!r}; found {', '.join(map(repr, row.values)) or 'none'}. "
        f"If it has another name, write columns: {{{column}: {other}}}"
    )


def _renamed(source: DataSource) -> Iterator[Row]:
    back = {theirs: ours for ours, theirs in source.columns.items()}
    for file, number, values in _raw_rows(source):
        for theirs in back:
            if theirs not in values:
                raise DataError(_missing(Row(source=file, number=number, values=values), back[theirs], source))
        ours = in_our_form({back.get(name, name): value for name, value in values.items()})
        if source.only:
            ours = {name: value for name, value in ours.items() if name in source.only}
        yield Row(source=file, number=number, values=ours)


_RawRow = tuple[str, int, Mapping[str, Any]]


def _raw_rows(source: DataSource) -> Iterator[_RawRow]:
    path = Path(source.path)
    if path.is_file():
        yield from _file_rows(path)
    elif path.is_dir() and any((path / n).exists() for n in ("dataset_info.json", "dataset_dict.json")):
        yield from _saved_rows(path, source.split)
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _READERS)
        if not files:
            raise DataError(f"directory {source.path!r} holds no {', '.join(sorted(_READERS))} file")
        for file in files:
            yield from _file_rows(file)
    elif path.suffix in _READERS or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source.path):
        raise DataError(f"data file {source.path!r} does not exist; give a file, a directory or a hub name")
    else:
        yield from _hub_rows(source)


def _file_rows(path: Path) -> Iterator[_RawRow]:
    if path.suffix not in _READERS:
        raise DataError(
            f"{str(path)!r} is of an unknown kind; write one of {', '.join(sorted(_READERS))}, for instance JSONL"
        )
    try:
        for number, values in _READERS[path.suffix](path):
            if not isinstance(values, Mapping):
                kind = type(values).__name__
                raise DataError(f'{path} row {number} is a {kind}, not an object such as {{"prompt": "..."}}')
            yield str(path), number, values
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}") from error


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path} row {number} is not valid JSON: {error.msg} at column {error.colno}; "
                    f"found {line.strip()[:60]!r}"
                ) from None


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path} line {error.lineno} is not valid JSON: {error.msg}; one object per line belongs into .jsonl"
        ) from None
    if not isinstance(data, list):
        raise DataError(f"{path} holds a {type(data).__name__}; write a list of objects, or JSONL")
    yield from enumerate(data, 1)


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        rows = (row for batch in table.iter_batches() for row in batch.to_pylist())
        yield from enumerate(rows, 1)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from None


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    import csv

    with path.open(encoding="utf-8", newline="") as file:
        yield from enumerate(csv.DictReader(file), 1)


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}


def _saved_rows(path: Path, split: str) -> Iterator[_RawRow]:
    import datasets

    loaded: Any = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"{str(path)!r} has no split {split!r}; it has {', '.join(map(str, loaded))}")
        loaded = loaded[split]
    yield from _numbered(f"{path}[{split}]", _with_stored_images(loaded))


def _hub_rows(source: DataSource) -> Iterator[_RawRow]:
    import datasets

    try:
        loaded: Any = datasets.load_dataset(source.path, source.name, split=source.split)
    except Exception as error:
        raise DataError(
            f"dataset {source.path!r} (split {source.split!r}) is no file here and cannot be had from the hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    yield from _numbered(f"{source.path}[{source.split}]", _with_stored_images(loaded))


def _with_stored_images(loaded: Any) -> Iterable[Any]:
    """Rows of a dataset whose columns of images hold these as they are stored, not decoded: `{bytes, path}`.

    So their size is looked at before they are decoded, and what is wrong with one names its row.
    """
    import datasets

    stored, image = datasets.Image(decode=False), datasets.Image
    columns: list[str] = []
    for name, feature in (loaded.features or {}).items():
        inner = getattr(feature, "feature", None)
        if isinstance(feature, image) or isinstance(inner, image):
            columns.append(name)
            loaded = loaded.cast_column(name, stored if isinstance(feature, image) else datasets.List(stored))
    return (
        ({**row, **{name: _stored_bytes(row[name]) for name in columns}} for row in loaded) if columns else loaded
    )


def _stored_bytes(value: Any) -> Any:
    """An image of the library's own type, of which it may keep the path alone; or a list of these."""
    if isinstance(value, list):
        return [_stored_bytes(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(value, Mapping) or value.get("bytes") is not None or not value.get("path"):
        return value
    return {"bytes": Path(str(value["path"])).read_bytes(), "path": value["path"]}


def _numbered(name: str, rows: Iterable[Any]) -> Iterator[_RawRow]:
    for number, values in enumerate(rows, 1):
        yield name, number, values
