"""Actors without any engine: how results and failures come back."""

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_core import EngineDiedError, ResourceError, WeightSyncError
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.ray import RayCluster
from rlhf_launch.workers.handles import close_workers
from rlhf_launch.workers.waits import Waits

pytestmark = pytest.mark.stack


class Actor:
    def __init__(self, name):
        self.name = name

    def greet(self):
        return self.name, os.environ.get("GREETING")

    def fail(self):
        raise WeightSyncError("bucket 3 of 7 did not arrive")

    def sleep(self, seconds):
        time.sleep(seconds)
        return "slept"

    def die(self):
        os._exit(7)

    def close(self):
        pass


@pytest.fixture(scope="module")
def cluster():
    cluster = RayCluster()
    yield cluster
    cluster.close()


def plan(name, **settings):
    return WorkerPlan(
        name=name, worker=Actor, arguments=(name,), cpus=0.25, env_vars={"GREETING": "hello"}, **settings
    )


def test_results_errors_and_deaths_come_back_as_what_they_are(cluster):
    first, second = cluster.place([plan("first"), plan("second")])
    waits = Waits(300)
    assert waits.gather([first.call("greet"), second.call("greet")], what="greetings") == [
        ("first", "hello"),
        ("second", "hello"),
    ]
    with pytest.raises(WeightSyncError, match="bucket 3 of 7") as caught:
        waits.gather([first.call("fail")], what="a failure")
    assert "raised by first (process " in caught.value.__notes__[0]
    with pytest.raises(EngineDiedError, match=r"second \(process \d+ on .*\) died during die") as caught:
        waits.gather([second.call("die")], what="a death")
    (note,) = caught.value.__notes__
    logs = Path(re.search(r"in (/tmp/ray-\S+)", note)[1])
    assert list(logs.glob("worker-*"))
    for handle in (first, second):
        close_workers([handle])
        close_workers([handle])


class Coroutines:
    """Many calls at once, while one of them blocks the event loop."""

    def __init__(self):
        self.calls = 0

    async def count(self):
        self.calls += 1
        while self.calls < 3:
            await asyncio.sleep(0.01)
        return self.calls

    async def block(self, seconds):
        time.sleep(seconds)
        return "slept"

    async def close(self):
        pass


def test_a_busy_worker_gives_its_pulse(cluster):
    plans = [
        plan("busy"),
        WorkerPlan(name="coroutines", worker=Coroutines, arguments=(), cpus=0.25, concurrency=100),
    ]
    busy, coroutines = cluster.place(plans)
    assert Waits(300).gather([coroutines.call("count") for _ in range(3)], what="counts") == [3, 3, 3]
    sleeping = [busy.call("sleep", 6.0), coroutines.call("block", 6.0)]
    idle = True
    while idle:  # calls take their time to arrive on a busy machine
        first, second = Waits(300).gather([busy.pulse(), coroutines.pulse()], what="pulses")
        assert not any(call.done() for call in sleeping)
        idle = "nothing" in (first.doing, second.doing)
    assert "sleep since" in first.doing
    assert "test_ray_handle.py" in first.stack
    assert "block since" in second.doing
    assert "test_ray_handle.py" in second.stack
    assert Waits(300).gather(sleeping, what="the end") == ["slept", "slept"]
    close_workers([busy, coroutines])


def test_temporary_files_of_workers_and_ray_go_with_the_cluster():
    """In a process of its own, since Ray is one for all of a process."""
    program = """
import os, pathlib, sys, tempfile
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.ray import RayCluster
class Maker:
    def make(self): return tempfile.mkdtemp()
cluster = RayCluster()
(handle,) = cluster.place([WorkerPlan(name="maker", worker=Maker, arguments=(), cpus=0.25)])
print(handle.call("make").result(), flush=True)
if "killed" in sys.argv: os.kill(os.getpid(), 9)
cluster.close()
"""
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    for argument in ("killed", "closed"):
        command = [sys.executable, "-c", program, argument]
        made = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True).stdout.strip()
        folder = Path(made).parents[1]
        assert (folder.parent, folder.name[:4]) == (Path("/tmp"), "ray-")
        until = time.monotonic() + 30
        while folder.exists() and argument == "killed" and time.monotonic() < until:
            time.sleep(0.1)
        assert not folder.exists()


def test_what_can_never_be_placed_is_refused_at_once(cluster):
    with pytest.raises(ResourceError, match=r"the largest host has 0"):
        cluster.place([plan("with a GPU", gpus=1)])
