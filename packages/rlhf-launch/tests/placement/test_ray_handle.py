"""Actors without any engine: how results and failures come back."""

import os

import pytest
from rlhf_core import EngineDiedError, ResourceError, WeightSyncError
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.ray import RayCluster
from rlhf_launch.workers.handles import close_workers, gather

pytestmark = pytest.mark.stack


class Actor:
    def __init__(self, name):
        self.name = name

    def greet(self):
        return self.name, os.environ.get("GREETING")

    def fail(self):
        raise WeightSyncError("bucket 3 of 7 did not arrive")

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
    assert gather([first.call("greet"), second.call("greet")], what="greetings", timeout_s=60) == [
        ("first", "hello"),
        ("second", "hello"),
    ]
    with pytest.raises(WeightSyncError, match="bucket 3 of 7") as caught:
        gather([first.call("fail")], what="a failure", timeout_s=60)
    assert "raised by first in fail" in caught.value.__notes__[0]
    with pytest.raises(EngineDiedError, match="second died during die"):
        gather([second.call("die")], what="a death", timeout_s=60)
    for handle in (first, second):
        close_workers([handle])
        close_workers([handle])


def test_what_can_never_be_placed_is_refused_at_once(cluster):
    with pytest.raises(ResourceError, match=r"needs 1 GPU for 1 workers, the Ray cluster has 0"):
        cluster.place([plan("with a GPU", gpus=1.0)])
