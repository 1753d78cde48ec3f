"""Ray on a busy host: it is started again where it was too slow, and its workers get their share of the cores."""

import os

import pytest
import ray
from rlhf_core import ResourceError
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.ray import RayCluster
from rlhf_launch.workers.handles import close_workers

pytestmark = pytest.mark.stack

TOO_SLOW = Exception("The current node timed out during startup. This could happen because ...")


class Worker:
    def niceness(self):
        return os.nice(0)

    def close(self):
        pass


@pytest.fixture
def slow_starts(monkeypatch):
    """Lets the first so many starts of Ray fail as on a busy host; lists the folders that they had."""
    folders, start = [], ray.init

    def begin(times):
        def init(*, _temp_dir, **settings):
            folders.append(_temp_dir)
            if len(folders) <= times:
                raise TOO_SLOW
            return start(_temp_dir=_temp_dir, **settings)

        monkeypatch.setattr(ray, "init", init)
        return folders

    return begin


def test_ray_that_is_too_slow_is_started_again_and_workers_are_as_nice_as_the_run(slow_starts):
    folders = slow_starts(2)
    tokens = 40_000_000
    cluster = RayCluster(step_tokens=tokens)
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        room = ray.cluster_resources()["object_store_memory"]
        assert room >= min(28 * tokens, int(0.3 * memory))  # for the samples of a step
        assert [os.path.exists(folder) for folder in folders] == [False, False, True]
        workers = cluster.place([WorkerPlan(name="policy", worker=Worker, arguments=(), cpus=0.25)])
        assert workers[0].call("niceness").result(timeout=60) == os.nice(0)
        close_workers(workers)
    finally:
        cluster.close()
    assert not any(os.path.exists(folder) for folder in folders)


def test_a_host_that_is_too_slow_for_ray_is_refused(slow_starts):
    folders = slow_starts(99)
    with pytest.raises(ResourceError, match="Ray did not start here in 3 attempts; the host is too busy"):
        RayCluster()
    assert len(folders) == 3
    assert not any(os.path.exists(folder) for folder in folders)


def test_other_failures_of_ray_are_not_repeated(monkeypatch):
    import ray

    starts = []

    def init(**settings):
        starts.append(settings)
        raise RuntimeError("no shared memory")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RuntimeError, match="no shared memory"):
        RayCluster()
    assert len(starts) == 1
    assert RayCluster._scratch is None
