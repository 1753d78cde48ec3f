from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
from rlhf_core import EngineConfig, ResourceError
from rlhf_launch.placement.plans import rank_plans
from rlhf_launch.workers.process import host_address, spared_collector, use_address

PROGRAM = """
import resource, sys, threading
import torch
from rlhf_launch.workers.process import keep_freed_memory, trim_memory

def pages_asked_for():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [torch.ones(size << 20) for size in (25, 5, 5, 5)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()

def work():
    print(pages_asked_for() and pages_asked_for())
    keep_freed_memory()
    # Small pieces may be cut from what was freed; then what is left of one is too small, and one more is asked for.
    print(min(pages_asked_for() for _ in range(8)))
    kept = resident()
    trim_memory()
    print(kept - resident())

if "thread" in sys.argv:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
"""


@pytest.mark.parametrize("on", ["main", "thread"])
def test_freed_memory_is_kept_until_it_is_trimmed(on: str) -> None:
    (plan,) = rank_plans("policy", "torch", EngineConfig(model="m", device="cpu"))  # workers run on threads
    env = os.environ | dict(plan.env_vars)
    ran = subprocess.run([sys.executable, "-c", PROGRAM, on], env=env, capture_output=True, text=True, check=True)
    before, after, given_back = map(int, ran.stdout.split())
    size = 4 * (40 << 20)
    assert before > size / (2 << 20)  # a page each of 2 MiB, or more of less
    assert after < before / 3
    assert given_back > 0.9 * size


NETWORK = ("RLHF_HOST_ADDRESS", "RLHF_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NETWORK:
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("wanted", ["lo", "127.0.0.0/8"])
def test_a_host_is_reached_over_the_interface_or_network_that_is_wanted(
    network: pytest.MonkeyPatch, wanted: str
) -> None:
    network.setenv("RLHF_INTERFACE", wanted)
    assert host_address() == "127.0.0.1"
    use_address("192.0.2.7")  # as the cluster knows this host
    assert {name: os.environ.get(name) for name in NETWORK} == {
        "RLHF_HOST_ADDRESS": "127.0.0.1",
        "RLHF_INTERFACE": wanted,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }


def test_the_address_that_the_cluster_knows_is_used_otherwise(network: pytest.MonkeyPatch) -> None:
    use_address("127.0.0.1")
    assert host_address() == "127.0.0.1"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_an_address_that_the_user_names_wins(network: pytest.MonkeyPatch) -> None:
    network.setenv("RLHF_HOST_ADDRESS", "192.0.2.1")
    network.setenv("RLHF_INTERFACE", "lo")
    use_address("192.0.2.7")
    assert host_address() == "192.0.2.1"
    assert "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize("wanted", ["eth99", "203.0.113.0/24"])
def test_an_interface_that_this_host_lacks_is_refused_with_those_that_it_has(
    network: pytest.MonkeyPatch, wanted: str
) -> None:
    network.setenv("RLHF_INTERFACE", wanted)
    with pytest.raises(ResourceError, match=r"has no such interface .* lo \(127\.0\.0\.1\)"):
        host_address()


def test_the_collector_is_spared_for_a_while_alone():
    before = gc.get_threshold(), gc.get_freeze_count()
    with spared_collector():
        assert gc.get_threshold()[0] > before[0][0]
        assert gc.get_freeze_count() > 10_000
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
