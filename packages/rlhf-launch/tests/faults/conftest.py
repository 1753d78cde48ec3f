import json
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the tests import from it when they are collected


@pytest.fixture(scope="session", autouse=True)
def faulty_plugins():
    """Make the engines that break importable in child processes, too."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), before]))
    yield
    os.environ.pop("PYTHONPATH")
    if before:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def fault(monkeypatch, tmp_path):
    """Let engines break, one after the other: `fault("policy-1", "step", call=2)`; returns the flag of each."""
    planned = []

    def plan(worker, point, **details):
        flag = tmp_path / f"flag-{len(planned)}"
        planned.append({"flag": str(flag), "worker": worker, "point": point, **details})
        monkeypatch.setenv("FAULTS", json.dumps(planned))
        return flag

    return plan
