"""Temporary folders whose owner ends well, is killed, or lives on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_launch.placement.scratch import ScratchFolder, clear_abandoned

OWN = """
import sys, time, pathlib
from rlhf_launch.placement.scratch import ScratchFolder
folder = ScratchFolder("try-", parent=pathlib.Path(sys.argv[1]))
(folder.path / "logs").mkdir()
(folder.path / "logs" / "one.log").write_text("here")
print(folder.path, folder._guard.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", OWN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    folder, guard = process.stdout.readline().split()
    yield process, folder, int(guard)
    process.kill()
    process.wait()


def test_a_folder_goes_when_it_is_closed(tmp_path):
    folder = ScratchFolder("try-", parent=tmp_path)
    (folder.path / "inner").mkdir()
    (folder.path / "link").symlink_to(tmp_path)
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_kept_goes_with_the_next_start(tmp_path):
    first = ScratchFolder("try-", parent=tmp_path)
    first.close(keep=True)
    assert first.path.exists()
    second = ScratchFolder("try-", parent=tmp_path)
    assert list(tmp_path.iterdir()) == [second.path]
    second.close()


def test_a_living_owner_keeps_its_folder_and_a_killed_one_loses_it(owner, tmp_path):
    process, folder, guard = owner
    (tmp_path / "try-of-others").mkdir()
    assert clear_abandoned("try-", tmp_path) == []
    os.kill(guard, signal.SIGKILL)
    process.kill()
    process.wait()
    assert [str(found) for found in clear_abandoned("try-", tmp_path)] == [folder]
    assert os.listdir(tmp_path) == ["try-of-others"]


WRITE = """
import mmap, os, sys, time
file = open(os.path.join(sys.argv[1], "logs", "writer.log"), "w")
shared = open("/dev/shm/rlhf-try-%d" % os.getpid(), "w+b")
shared.truncate(4096)
memory = mmap.mmap(shared.fileno(), 4096)
print("there", flush=True)
time.sleep(60)
"""
READ = """
import os, sys, time
file = open(os.path.join(sys.argv[1], "logs", "one.log"))
print("there", flush=True)
time.sleep(60)
"""


def test_what_a_killed_owner_had_started_is_ended_by_the_guard(owner):
    process, folder, _ = owner
    begun = [
        subprocess.Popen([sys.executable, "-c", program, folder], stdout=subprocess.PIPE, text=True)
        for program in (WRITE, READ)
    ]
    try:
        assert [one.stdout.readline() for one in begun] == ["there\n"] * 2
        shared = Path(f"/dev/shm/rlhf-try-{begun[0].pid}")
        assert shared.exists()
        process.kill()
        assert begun[0].wait(20) == -signal.SIGKILL
        until = time.monotonic() + 20
        while (Path(folder).exists() or shared.exists()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(folder).exists()
        assert not shared.exists()
        assert begun[1].poll() is None  # who only reads a log there is somebody else
    finally:
        for one in begun:
            one.kill()
            one.communicate()
