"""The checks on GPUs collect on any machine, say what they are, and stand in the docs as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_registry import Check
from gpu_report import measurement_table, outcome_table

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "gpu.md"


@pytest.fixture(scope="module")
def listed() -> str:
    """The list on a machine without a GPU."""
    command = [sys.executable, str(HERE), "--list"]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def test_the_list_in_the_docs_is_fresh(listed: str) -> None:
    assert listed in PAGE.read_text(), "paste the output of `nox -s gpu -- --list` into docs/gpu.md"


def test_every_check_is_skipped_with_the_reason_where_there_is_no_gpu(listed: str) -> None:
    _, _, *rows = listed.splitlines()
    assert len(rows) > 20
    assert all("skipped: needs" in row and "this machine has 0" in row for row in rows)
    names = [row.split("|")[1] for row in rows]
    assert len(set(names)) == len(names)


def test_what_a_machine_lacks() -> None:
    check = Check(name="a", shows="b", gpus=2, packages=("torch", "no_such_package"))
    assert check.missing(1) == "needs 2 GPUs, this machine has 1"
    assert check.missing(2) == "needs no_such_package"
    assert Check(name="a", shows="b", packages=("torch",)).missing(1) == ""


def test_tables_of_what_was_found() -> None:
    lines = [
        {"kind": "outcome", "check": "links", "outcome": "passed", "seconds": 1.0},
        {"kind": "measurement", "what": "sync", "setting": "a|b", "value": "3 GB/s"},
        {"kind": "outcome", "check": "links", "outcome": "failed", "seconds": 0.5},
    ]
    assert outcome_table(lines).splitlines()[2:] == ["| links | 1 | 1 | 0 | 1.5 |"]
    assert measurement_table(lines).splitlines()[2:] == ["| sync | a/b | 3 GB/s |"]
