from __future__ import annotations

import json

import pytest
from rlhf_algos.data.sources import DataSource, read_rows
from rlhf_core import ConfigError, DataError

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    import datasets
    import pyarrow
    import pyarrow.parquet

    write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("prompt,answer\na,1\nb,2\n")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "splits"))
    for name in ("a.jsonl", "a.json", "a.parquet", "a.csv", "saved", "splits"):
        rows = read_rows(str(tmp_path / name))
        assert [dict(row.values) for row in rows] == ROWS, name
        assert [row.number for row in rows] == [1, 2]


def test_numbers_are_lines_and_blank_lines_do_not_shift_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n{"x": 2}\n')
    assert [row.place for row in read_rows(str(tmp_path / "a.jsonl"))] == [
        f"{tmp_path}/a.jsonl row 1",
        f"{tmp_path}/a.jsonl row 3",
    ]


def test_a_directory_of_files_is_read_in_order(tmp_path):
    write(tmp_path / "2.jsonl", ROWS[1:])
    write(tmp_path / "1.jsonl", ROWS[:1])
    assert [row["prompt"] for row in read_rows(str(tmp_path))] == ["a", "b"]


def test_columns_are_renamed_and_rows_limited(tmp_path):
    source = DataSource(path=write(tmp_path / "a.jsonl", ROWS), columns={"completion": "answer"}, limit=1)
    (row,) = read_rows(source, required=["prompt", "completion"])
    assert dict(row.values) == {"prompt": "a", "completion": "1"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"prompt": 1}\n{"prompt": \n', ["a.jsonl row 2", "not valid JSON"]),
        ("[1, 2]\n", ["a.jsonl row 1", "is a list"]),
        ("", ["holds no rows"]),
        ('{"promt": "x"}\n', ["a.jsonl row 1", "no column 'prompt'", "found 'promt'", "columns: {prompt: promt}"]),
        ('{"prompt": "ok"}\n{"prompt": "bad"}\n', ["a.jsonl row 2", "too bad"]),
    ],
)
def test_bad_rows_are_named(tmp_path, text, parts):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError) as caught:
        read_rows(
            str(tmp_path / "a.jsonl"),
            required=["prompt"],
            check=lambda row: "too bad" if row["prompt"] == "bad" else None,
        )
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("path", ["missing.jsonl", "./missing", "/no/such/directory"])
def test_a_missing_file_is_not_looked_for_on_the_hub(path):
    with pytest.raises(DataError, match="does not exist"):
        read_rows(path)


def test_unknown_kinds_and_missing_splits(tmp_path):
    import datasets

    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="unknown kind"):
        read_rows(str(tmp_path / "a.txt"))
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="no split 'test'; it has train"):
        read_rows(DataSource(path=str(tmp_path / "splits"), split="test"))
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"b\.parquet"):
        read_rows(str(tmp_path / "b.parquet"))


def test_sources_are_validated():
    with pytest.raises(ConfigError, match="weight"):
        DataSource(path="x", weight=0)
    with pytest.raises(ConfigError, match="limit"):
        DataSource(path="x", limit=0)


def test_only_the_named_columns_are_read(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "x", "prompt": "a", "completion": "b"}])
    (row,) = read_rows(DataSource(path=path, only=("prompt", "completion")))
    assert dict(row.values) == {"prompt": "a", "completion": "b"}
