"""What a run hears when a worker, Ray's head or its raylet is killed, and what is left then.

How soon is measured by `nox -s faults`; here calls end that would last ten minutes.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rlhf_core import EngineDiedError
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.ray import RayCluster
from rlhf_launch.workers.handles import close_workers
from rlhf_launch.workers.waits import Waits

pytestmark = pytest.mark.stack


class Sleeper:
    def sleep(self, seconds):
        time.sleep(seconds)

    def whereabouts(self):
        return os.getpid(), os.environ["RLHF_HOST_ADDRESS"]

    def close(self):
        pass


@pytest.fixture
def cluster():
    cluster = RayCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def workers(cluster):
    plans = [WorkerPlan(name=f"policy-{i}", worker=Sleeper, arguments=(), cpus=0.25) for i in range(3)]
    handles = cluster.place(plans)
    found = Waits(300).call_all(handles, "whereabouts", what="say where they are")
    assert {address for _, address in found} == {cluster._ray.util.get_node_ip_address()}
    return handles, [pid for pid, _ in found]


def of_ray(name):
    """The process of Ray's that this one has started, by its name."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    return next(int(pid) for pid, parent, command in rows if command == name and int(parent) == os.getpid())


def alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def killed_worker_is_named(handle, pid):
    call = handle.call("sleep", 600)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match=rf"policy-2 \(process {pid} on [\d.]+\) died during sleep: "):
        call.result(timeout=240)


@pytest.mark.parametrize("process", ["gcs_server", "raylet"])
def test_a_head_or_raylet_that_dies_at_the_very_end_does_not_hold_up_the_close(cluster, workers, process):
    _, pids = workers
    killed = of_ray(process)
    os.kill(killed, signal.SIGKILL)
    while alive(killed):
        time.sleep(0.01)
    cluster.close()
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    ("process", "message"),
    [
        ("gcs_server", r"Ray's head at [\d.]+ is gone, and with it the cluster: nothing listens at"),
        ("raylet", r"Ray's raylet on this host \([\d.]+\) is gone, and with it all workers of this process"),
    ],
)
def test_without_head_or_raylet_every_call_fails_and_nothing_is_left(cluster, workers, process, message):
    handles, pids = workers
    killed_worker_is_named(handles.pop(), pids.pop())
    calls = [handle.call("sleep", 600) for handle in handles]
    killed = of_ray(process)
    os.kill(killed, signal.SIGKILL)
    for call in calls:
        with pytest.raises(EngineDiedError, match=message):
            call.result(timeout=240)
    with pytest.raises(EngineDiedError, match=message):
        handles[0].call("whereabouts").result(timeout=60)
    with pytest.raises(EngineDiedError, match=message):
        cluster.restart("policy-0")
    close_workers(handles)
    cluster.close()
    assert not any(alive(pid) for pid in pids)
