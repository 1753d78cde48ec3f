"""The account of tensors on the host, and what of it is free."""

import gc

import pytest
import torch
from rlhf_core import MemoryMeter, optimizer_memory_to_come
from rlhf_core.training import memory_meter

CPU = torch.device("cpu")
METER = MemoryMeter(CPU)
KIB = 1024


def test_what_lives_at_once_is_counted_by_hand():
    def run():
        first = torch.zeros(256)  # 1 KiB
        second = first + 1  # 2 KiB
        del first  # 1 KiB
        third = second * 2  # 2 KiB
        del second, third
        torch.zeros(128)  # half a KiB

    assert METER.peak(run) == 2 * KIB


def test_what_was_there_before_does_not_count_and_views_do_not_either():
    before = torch.zeros(1 << 16)

    def run():
        before.add_(1)
        part = before.view(256, 256)[3]
        part.mul_(2)

    assert METER.peak(run) == 0


def test_what_the_backward_pass_waits_for_counts_until_it_is_over():
    def run(layers):
        hidden = torch.zeros(256, requires_grad=True)
        for _ in range(layers):
            hidden = hidden.exp()  # each keeps its result for the backward pass
        hidden.sum().backward()

    peaks = [METER.peak(lambda layers=layers: run(layers)) for layers in (8, 16)]
    assert peaks[1] - peaks[0] == 8 * KIB


def test_the_same_pass_takes_the_same_every_time():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    rows = torch.randn(32, 64)
    model(rows).sum().backward()  # the gradients are there from now on

    def run():
        model(rows).sum().backward()

    peaks = {METER.peak(run) for _ in range(5)}
    gc.collect()
    assert len(peaks) == 1
    assert peaks.pop() >= 32 * 256 * 4 * 2, "the hidden layer before and after the activation"


def test_moments_that_an_optimizer_has_not_made_yet_are_to_come():
    weight = torch.nn.Parameter(torch.zeros(100))
    other = torch.nn.Parameter(torch.zeros(50, dtype=torch.bfloat16))
    adam = torch.optim.AdamW([weight, other])
    assert optimizer_memory_to_come(adam, CPU) == 2 * (100 * 4 + 50 * 2)
    weight.grad = torch.ones(100)
    adam.step()
    assert optimizer_memory_to_come(adam, CPU) == 2 * 50 * 2
    assert optimizer_memory_to_come(adam, torch.device("cuda")) == 0, "they are in the host's memory"
    assert optimizer_memory_to_come(None, CPU) == 0


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 1 GiB of which half is available, and its control groups."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:        1048576 kB\nMemFree:   1 kB\nMemAvailable:     524288 kB\n")
    monkeypatch.setattr(memory_meter, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory_meter, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory_meter, "_OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/job/worker\n")
    (tmp_path / "cgroup" / "job" / "worker").mkdir(parents=True)
    return tmp_path


def limit(folder, *, most, used, inactive=0):
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_free_is_what_the_machine_has_available(machine):
    assert METER.free() == 512 << 20
    assert METER.size == 1 << 30


def test_a_control_group_may_leave_less(machine):
    limit(machine / "cgroup" / "job", most=300 << 20, used=100 << 20, inactive=20 << 20)
    limit(machine / "cgroup" / "job" / "worker", most="max", used=90 << 20)
    assert METER.free() == 220 << 20, "files in memory make way"
    assert METER.size == 300 << 20


def test_without_linux_there_is_no_limit(machine):
    (machine / "meminfo").unlink()
    (machine / "own").unlink()
    assert METER.free() > 1 << 60
