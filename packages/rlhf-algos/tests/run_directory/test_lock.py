"""One owner at a time; a dead one's lock is taken over, a living one's is not."""

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from rlhf_algos.run_directory import lock as locks
from rlhf_algos.run_directory.lock import DirectoryLock, _own
from rlhf_core import ConfigError

HOLD = """
import sys, time
from pathlib import Path
from rlhf_algos.run_directory.lock import DirectoryLock
DirectoryLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / ".lock"


def test_a_second_owner_is_refused_until_the_first_lets_go(path):
    with DirectoryLock(path) as first:
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on "):
            DirectoryLock(path).acquire()
        first.release()
        with DirectoryLock(path):
            pass


@pytest.mark.stack
def test_a_killed_process_leaves_a_lock_that_is_taken_over_aloud(path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use by process {holder.pid}"):
            DirectoryLock(path).acquire()
    finally:
        holder.kill()
        holder.wait()
    said = []
    with DirectoryLock(path, say=said.append):
        pass
    assert len(said) == 1
    assert f"process {holder.pid}" in said[0]


def test_a_lock_that_was_given_back_is_taken_silently(path):
    said = []
    for _ in range(2):
        with DirectoryLock(path, say=said.append):
            pass
    assert said == []


def left_by(path, owner):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(asdict(owner)))


class TestWithoutLocksOfTheKernel:
    """As on a mount that knows none: what the file says decides."""

    @pytest.fixture(autouse=True)
    def no_flock(self, monkeypatch):
        def refuse(file, operation):
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", refuse)

    def test_a_living_process_of_this_host_keeps_it(self, path):
        left_by(path, _own())
        with pytest.raises(ConfigError, match="in use by"):
            DirectoryLock(path).acquire()

    def test_another_process_of_the_same_number_is_not_its_owner(self, path):
        left_by(path, replace(_own(), born=1))
        said = []
        with DirectoryLock(path, say=said.append):
            pass
        assert "taken over" in said[0]


class TestFromAnotherHost:
    def test_an_owner_that_touches_the_file_keeps_it(self, path, monkeypatch):
        left_by(path, replace(_own(), host="far"))
        beats = []

        def beat(seconds):
            beats.append(seconds)
            if len(beats) == 2:
                os.utime(path, ns=(1, 1))

        monkeypatch.setattr(locks.time, "sleep", beat)
        with pytest.raises(ConfigError, match=r"in use by process .* on far"):
            DirectoryLock(path).acquire()

    def test_a_silent_owner_is_taken_over(self, path, monkeypatch):
        left_by(path, replace(_own(), host="far"))
        monkeypatch.setattr(locks.time, "sleep", lambda seconds: None)
        said = []
        with DirectoryLock(path, say=said.append):
            pass
        assert "looking whether" in said[0]
        assert "taken over" in said[1]

    def test_an_owner_touches_its_file(self, path):
        with DirectoryLock(path, beat_s=0.01):
            os.utime(path, ns=(1, 1))
            deadline = 500
            while os.stat(path).st_mtime_ns == 1 and deadline:
                locks.time.sleep(0.01)
                deadline -= 1
            assert os.stat(path).st_mtime_ns != 1
