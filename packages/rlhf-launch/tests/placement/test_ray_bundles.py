"""Layouts on real Ray: two hosts with two GPUs each that Ray believes in, and workers that say what they see.

Nothing here touches a GPU: Ray counts them, and tells each worker which are its own.
"""

import os

import pytest
from rlhf_core import ResourceError
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.ray import RAY_VARIABLES, RayCluster
from rlhf_launch.placement.ray_bundles import hosts_of
from rlhf_launch.workers.handles import close_workers
from rlhf_launch.workers.waits import Waits

pytestmark = pytest.mark.stack


class Witness:
    def sees(self):
        import ray

        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return ray.get_runtime_context().get_node_id(), tuple(devices.split(",")) if devices else ()

    def variable(self, name):
        return os.environ.get(name)

    def close(self):
        pass


def role(name, workers, *, gpus=1, **given):
    return [
        WorkerPlan(name=f"{name}-{i}", worker=Witness, arguments=(), gpus=gpus, cpus=0.1, **given)
        for i in range(workers)
    ]


@pytest.fixture(scope="module")
def ray():
    os.environ.update(RAY_VARIABLES)

    import ray
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, **memory})
    cluster.add_node(num_cpus=2, num_gpus=2, **memory)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def cluster(ray):
    cluster = RayCluster()
    yield cluster
    cluster.close()


def seen(cluster, plans):
    """Host and devices of each worker, by its name; the workers are closed."""
    handles = cluster.place(plans)
    found = Waits(300).call_all(handles, "sees", what="say what they see")
    close_workers(handles)
    return dict(zip((plan.name for plan in plans), found, strict=True))


def of(found, name):
    return [place for worker, place in found.items() if worker.rpartition("-")[0] == name]


def test_separate_roles_have_devices_of_their_own_and_a_new_worker_those_of_the_old(cluster):
    plans = [*role("policy", 1), *role("reference", 1), *role("rollout", 1, gpus=2)]
    handles = cluster.place(plans)
    found = Waits(300).call_all(handles, "sees", what="say what they see")
    everything = [(host, device) for host, devices in found for device in devices]
    assert len(everything) == len(set(everything)) == 4
    assert found[0][0] == found[1][0] != found[2][0]
    handles[2].end()
    again = cluster.restart("rollout-0")
    assert Waits(300).call_all([again], "sees", what="say what it sees") == [found[2]]
    close_workers([*handles[:2], again])


def test_colocated_roles_see_the_same_device_at_the_same_place(cluster):
    found = seen(cluster, [*role("policy", 4, devices="all"), *role("rollout", 2, gpus=2, devices="all")])
    policy = of(found, "policy")
    assert [device for _, (device,) in policy] == [*"0101"]
    assert [host for host, _ in policy] == [policy[0][0]] * 2 + [policy[2][0]] * 2
    assert of(found, "rollout") == [(host, ("0", "1")) for host in (policy[0][0], policy[2][0])]


def test_pairs_on_hosts_beside_what_another_job_holds(cluster, ray):
    other = RayCluster()
    (holder,) = other.place(role("other", 1))
    ((taken, _),) = Waits(300).call_all([holder], "sees", what="be there")
    pairs = [*role("policy", 2, devices="a", together=2), *role("reference", 1, devices="a")]
    found = seen(cluster, [*pairs, *role("critic", 1)])
    assert of(found, "policy")[0] == of(found, "reference")[0]
    assert {host for host, _ in of(found, "policy")} == {host for host, _ in of(found, "reference")} != {taken}
    assert [host for host, _ in of(found, "critic")] == [taken]
    close_workers([holder])
    other.close()


def test_what_one_host_cannot_hold_is_refused_with_the_numbers(cluster, ray):
    assert [host.gpus for host in hosts_of(ray)] == [2, 2]
    with pytest.raises(ResourceError, match="a worker of rollout needs 4 GPUs, and the largest host has 2"):
        cluster.place(role("rollout", 1, gpus=4))
    with pytest.raises(ResourceError, match="the run needs 5 GPU for 5 workers, the cluster has 4"):
        cluster.place(role("policy", 5))


def test_a_worker_whose_host_is_lost_gets_room_on_another(ray, cluster):
    second = next(host for host in hosts_of(ray) if host.node != ray.get_runtime_context().get_node_id())
    (first,) = cluster.place(role("rollout", 1, hosts=None))
    place = cluster._places["rollout-0"][1]
    (before,) = Waits(300).call_all([first], "sees", what="say what it sees")
    # As the watch of the doors does when nothing listens at its host any more.
    cluster._gone.add(place.node)
    again = cluster.restart("rollout-0")
    (after,) = Waits(300).call_all([again], "sees", what="say what it sees")
    assert {before[0], after[0]} == {second.node, ray.get_runtime_context().get_node_id()}
    assert len(after[1]) == 1
    cluster._gone.add(after[0])
    with pytest.raises(ResourceError):
        cluster.restart("rollout-0")
    close_workers([first, again])
