"""Processes that can share memory know each other by it."""

import subprocess
import sys

import pytest
from rlhf_core.weight_sync.transports.mapped_memory import shared_memory_id

ASK = "from rlhf_core.weight_sync.transports.mapped_memory import shared_memory_id; print(shared_memory_id())"


@pytest.mark.stack
def test_another_process_on_this_host_has_the_same_id():
    found = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(shared_memory_id())


def test_without_shared_memory_there_is_no_id(monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    assert shared_memory_id() is None
