"""Processes that can share memory know each other by it."""

import errno
import os
import subprocess
import sys

import pytest
from rlhf_core import WeightSyncError
from rlhf_core.weight_sync.transports.mapped_memory import file_segment, shared_memory_id

ASK = "from rlhf_core.weight_sync.transports.mapped_memory import shared_memory_id; print(shared_memory_id())"


@pytest.mark.stack
def test_another_process_on_this_host_has_the_same_id():
    found = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(shared_memory_id())


def test_without_shared_memory_there_is_no_id(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    assert shared_memory_id() is None


MAP = """
import sys
from rlhf_core.weight_sync.transports.mapped_memory import map_file
memory = map_file([sys.argv[1], 8192])
print(int(memory[8000]), flush=True)
memory[1] = 9
sys.stdin.read()
print(int(memory[2]))
"""


@pytest.mark.stack
def test_a_segment_is_the_same_memory_in_another_process_and_has_no_name(tmp_path):
    tensor, (name, nbytes), release = file_segment(8000)
    assert nbytes == tensor.numel() == 8192
    tensor.zero_()
    tensor[8000] = 7
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", MAP, name], **pipes) as other:
        assert other.stdout.readline().strip() == "7"
        release()
        tensor[2] = 8
        assert other.communicate("")[0].strip() == "8"
    assert int(tensor[1]) == 9
    assert name.startswith("/proc/"), "it has no name of its own that could stay"


def test_memory_that_cannot_be_had_is_named(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(WeightSyncError, match="3 MiB of shared memory cannot be had"):
        file_segment(3 << 20)
    assert len(os.listdir("/proc/self/fd")) == before
