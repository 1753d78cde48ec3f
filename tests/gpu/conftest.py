"""Skips what this machine cannot run, and keeps what the checks find: outcomes and measurements."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# Modules beside the checks, and the tiny models of every family.
sys.path += [str(HERE), str(HERE.parents[1] / "packages" / "rlhf-core" / "tests" / "families")]

from gpu_registry import check_of, gpu_count  # noqa: E402

Measure = Callable[[str, str, object], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every check says what it is; one that this machine cannot run is skipped with the reason."""
    gpus = gpu_count()
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        check = check_of(item)
        if check is None:
            raise pytest.UsageError(f"{item.nodeid} has the marker gpu without gpu_check, which says what it shows")
        if reason := check.missing(gpus):
            item.add_marker(pytest.mark.skip(reason=reason))


def note(kind: str, **values: object) -> None:
    """Add a line to the file that the command makes its tables of."""
    if path := os.environ.get("RLHF_GPU_RESULTS"):
        with open(path, "a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Note the outcome of each test of a check."""
    report = yield
    check = check_of(item) if item.get_closest_marker("gpu") else None
    if check is not None and (report.when == "call" or report.outcome != "passed"):
        note("outcome", check=check.name, outcome=report.outcome, seconds=report.duration)
    return report


@pytest.fixture
def measure() -> Measure:
    """`measure(what, setting, value)` adds a row to the table of measurements."""
    return lambda what, setting, value: note("measurement", what=what, setting=setting, value=str(value))


@pytest.fixture(autouse=True)
def _free_gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a check leaves behind is not to be the next one's lack of memory."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
