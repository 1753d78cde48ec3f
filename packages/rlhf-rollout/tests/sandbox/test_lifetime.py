"""What a process starts ends with it."""

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_rollout.sandbox import lifetime


@pytest.fixture
def fresh():
    lifetime._prefix.cache_clear()
    yield
    lifetime._prefix.cache_clear()


def with_word(word):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue
    return found


def test_a_detached_child_ends_with_the_process_that_is_killed(fresh):
    prefix = lifetime.in_own_process_namespace([])
    if not prefix:
        pytest.skip("bwrap is not here, or not permitted")
    word = f"600.{secrets.randbelow(10**9):09d}"
    code = f"import subprocess, time\nsubprocess.Popen(['sleep', '{word}'], start_new_session=True)\n"
    command = [sys.executable, "-c", code + "print('up', flush=True)\ntime.sleep(600)"]
    process = subprocess.Popen(lifetime.in_own_process_namespace(command), stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    assert with_word(word)
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 120
    while with_word(word) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not with_word(word)


def test_without_bwrap_commands_stay_as_they_are(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert lifetime.in_own_process_namespace(["a", "b"]) == ["a", "b"]
