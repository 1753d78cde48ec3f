"""Markdown tables of the checks: what there is, what came of it, what was measured."""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpu_registry import Check, check_of, gpu_count


class _Collected:
    """A pytest plugin that keeps the checks of the collected tests, in order, with the number of their tests."""

    def __init__(self) -> None:
        self.checks: dict[str, tuple[Check, int]] = {}
        self.errors: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if (check := check_of(item)) is not None:
                self.checks[check.name] = (check, self.checks.get(check.name, (check, 0))[1] + 1)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(report.longreprtext)


def collected(folder: Path) -> list[tuple[Check, int]]:
    """Every check in the folder, and how many tests it has.

    Raises:
        RuntimeError: a file of checks cannot be imported.
    """
    plugin = _Collected()
    arguments = ["--collect-only", "-q", "-m", "gpu", "-o", "python_files=check_*.py", "-p", "no:cacheprovider"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main([str(folder), *arguments], plugins=[plugin])
    if plugin.errors or code != 0:
        raise RuntimeError("\n".join(plugin.errors) or f"pytest ended with {code}: {said.getvalue()}")
    return list(plugin.checks.values())


def listing(folder: Path) -> str:
    """The table of `--list`."""
    gpus = gpu_count()
    rows = [
        (
            check.name,
            check.shows,
            str(tests),
            str(check.gpus),
            ", ".join(check.packages) or "-",
            f"skipped: {reason}" if (reason := check.missing(gpus)) else "runs",
        )
        for check, tests in collected(folder)
    ]
    return table(("check", "what it shows", "tests", "GPUs", "packages", "on this machine"), rows)


def outcome_table(lines: Iterable[Mapping[str, Any]]) -> str:
    """One row for each check: how many of its tests passed, failed and were skipped, and seconds."""
    outcomes: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "outcome":
            outcomes[line["check"]].append(line)
    rows = []
    for name, found in outcomes.items():
        counts = [sum(line["outcome"] == outcome for line in found) for outcome in ("passed", "failed", "skipped")]
        rows.append((name, *map(str, counts), f"{sum(line['seconds'] for line in found):.1f}"))
    return table(("check", "passed", "failed", "skipped", "seconds"), rows)


def measurement_table(lines: Iterable[Mapping[str, Any]]) -> str:
    """One row for each measurement, in the order in which they were made."""
    rows = [(line["what"], line["setting"], line["value"]) for line in lines if line["kind"] == "measurement"]
    return table(("measured", "setting", "value"), rows)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
