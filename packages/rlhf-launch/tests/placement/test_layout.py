"""Who sits where, worked out by hand for small clusters; and what is refused, with its numbers."""

from dataclasses import replace

import pytest
from rlhf_core import ConfigError, ResourceError
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.layout import Host, lay_out


def role(name, workers, *, gpus=1, **given):
    return [WorkerPlan(name=f"{name}-{i}", worker=object, arguments=(), gpus=gpus, **given) for i in range(workers)]


def hosts(count, gpus, cpus=1000.0):
    return [Host(name=f"h{i}", gpus=gpus, cpus=cpus) for i in range(count)]


def seats(layout, name):
    """Host and GPUs of each worker of a role, as a person would count the GPUs of the host."""
    return [
        (bundle.host.name, tuple(bundle.first + device for device in seat.devices))
        for bundle, seat in layout.seats_of(name)
    ]


def test_separate_roles_have_gpus_of_their_own():
    layout = lay_out([*role("policy", 2), *role("critic", 1), *role("rollout", 1)], hosts(1, 4))
    assert seats(layout, "policy") == [("h0", (0,)), ("h0", (1,))]
    assert seats(layout, "critic") == [("h0", (2,))]
    assert seats(layout, "rollout") == [("h0", (3,))]
    assert layout.shared == ()


def test_roles_that_share_sit_on_the_same_gpus_and_take_only_once_the_cpus():
    both = [*role("policy", 4, devices="a", cpus=2.0), *role("reference", 4, devices="a", cpus=1.0)]
    layout = lay_out(both, hosts(1, 4, cpus=8.0))
    assert seats(layout, "policy") == seats(layout, "reference") == [("h0", (i,)) for i in range(4)]
    assert layout.shared == (frozenset({"policy", "reference"}),)
    (bundle,) = layout.bundles
    assert (bundle.gpus, bundle.cpus) == (4, 8.0)
    with pytest.raises(ResourceError, match="the run needs 12 CPU for 8 workers, the cluster has 8"):
        lay_out([*role("policy", 4, cpus=2.0), *role("reference", 4, cpus=1.0)], hosts(1, 8, cpus=8.0))


def test_a_smaller_role_sits_on_the_first_devices_of_the_set():
    layout = lay_out([*role("policy", 4, devices="a"), *role("reward", 1, devices="a")], hosts(1, 4))
    assert seats(layout, "reward") == [("h0", (0,))]


def test_engines_of_several_gpus_share_those_of_as_many_ranks():
    layout = lay_out([*role("policy", 8, devices="a"), *role("rollout", 2, gpus=4, devices="a")], hosts(2, 4))
    assert seats(layout, "rollout") == [("h0", (0, 1, 2, 3)), ("h1", (0, 1, 2, 3))]
    assert seats(layout, "policy")[3:5] == [("h0", (3,)), ("h1", (0,))]


def engines(count, over, *, gpus=1, **given):
    """Engines over several hosts each."""
    return [
        replace(
            plan,
            parts=tuple(replace(plan, name=f"{plan.name}.{part}") for part in range(1, over)),
        )
        for plan in role("rollout", count, gpus=gpus, **given)
    ]


def by_name(layout, name):
    return {seat.plan.name: bundle.host.name for bundle, seat in layout.seats_of(name)}


def test_the_parts_of_an_engine_sit_on_hosts_of_their_own():
    layout = lay_out([*role("policy", 4), *engines(1, 2, gpus=4)], hosts(3, 4))
    assert by_name(layout, "rollout") == {"rollout-0": "h0", "rollout-0.1": "h1"}
    assert {host for host, _ in seats(layout, "policy")} == {"h2"}
    # On GPUs, one after the other: two engines of 2 x 2 GPUs fill two hosts of 4.
    layout = lay_out(engines(2, 2, gpus=2), hosts(2, 4))
    placed = dict(zip(by_name(layout, "rollout"), seats(layout, "rollout"), strict=True))
    assert placed == {
        "rollout-0": ("h0", (0, 1)),
        "rollout-1": ("h0", (2, 3)),
        "rollout-0.1": ("h1", (0, 1)),
        "rollout-1.1": ("h1", (2, 3)),
    }


def test_engines_over_hosts_of_different_sizes_find_the_room_that_there_is():
    # The first two hosts for the first engine would leave the second one host alone.
    uneven = [Host(name=f"h{i}", gpus=gpus) for i, gpus in enumerate((4, 4, 8))]
    placed = by_name(lay_out(engines(2, 2, gpus=4), uneven), "rollout")
    assert placed == {"rollout-0": "h0", "rollout-0.1": "h2", "rollout-1": "h1", "rollout-1.1": "h2"}
    # On CPUs workers are counted by their cores.
    placed = by_name(lay_out(engines(1, 2, gpus=0, cpus=2.0), hosts(2, 0, cpus=2.0)), "rollout")
    assert placed == {"rollout-0": "h0", "rollout-0.1": "h1"}


def test_engines_over_several_hosts_are_refused_with_the_numbers():
    message = (
        r"rollout: each engine needs 4 GPUs and 1 CPU on each of 2 hosts, and after 1 engine\(s\) 1 host\(s\) have "
        r"that; before them, free are 4 on h0, 12 on h1"
    )
    with pytest.raises(ResourceError, match=message):
        lay_out(engines(2, 2, gpus=4), [Host(name="h0", gpus=4), Host(name="h1", gpus=12)])
    with pytest.raises(
        ResourceError, match=r"a worker of rollout needs 8 GPUs, and the largest host has 4: .*several"
    ):
        lay_out(engines(1, 2, gpus=8), hosts(4, 4))
    with pytest.raises(ResourceError, match=r"after 0 engine\(s\) 1 host\(s\) have that"):
        lay_out(engines(1, 2, gpus=4, hosts=("h1",)), hosts(2, 8))
    with pytest.raises(ConfigError, match="policy and rollout share devices, but workers over 2 hosts have"):
        lay_out([*role("policy", 2, devices="a"), *engines(1, 2, devices="a")], hosts(2, 8))


def test_ranks_that_belong_together_do_not_straddle_hosts():
    # 6 ranks in pairs on hosts of 3 GPUs: two on each, and the third GPU of each stays free.
    layout = lay_out(role("policy", 6, together=2), hosts(3, 3))
    assert [host for host, _ in seats(layout, "policy")] == ["h0", "h0", "h1", "h1", "h2", "h2"]
    with pytest.raises(ResourceError, match="policy: no host has 2 GPUs free that must be together"):
        lay_out(role("policy", 6, together=2), [*hosts(2, 3), Host(name="h2", gpus=1)])


def test_ranks_follow_hosts():
    layout = lay_out(role("policy", 16), hosts(2, 8))
    assert [host for host, _ in seats(layout, "policy")] == ["h0"] * 8 + ["h1"] * 8


def test_a_role_goes_to_the_one_host_that_it_leaves_least_of():
    layout = lay_out([*role("policy", 8), *role("rollout", 2)], [Host(name="big", gpus=12), Host(name="s", gpus=2)])
    assert seats(layout, "policy")[0][0] == "big"
    assert {host for host, _ in seats(layout, "rollout")} == {"s"}


def test_large_groups_are_placed_before_small_ones():
    # The four ranks of the policy could take half of each host; the two engines of 4 GPUs need whole hosts.
    plans = [*role("policy", 4), *role("rollout", 2, gpus=4)]
    layout = lay_out(plans, hosts(3, 4))
    assert {host for host, _ in seats(layout, "policy")} == {"h2"}


def test_hosts_by_number_and_by_name():
    spread = lay_out(role("policy", 4, hosts=2), hosts(2, 8))
    assert [host for host, _ in seats(spread, "policy")] == ["h0", "h0", "h1", "h1"]
    named = lay_out([*role("policy", 2), *role("rollout", 2, hosts=("h1",))], hosts(2, 4))
    assert {host for host, _ in seats(named, "rollout")} == {"h1"}
    with pytest.raises(
        ConfigError, match=r"rollout: hosts names 'h7', which is not in the cluster; there are h0, h1"
    ):
        lay_out(role("rollout", 1, hosts=("h7",)), hosts(2, 4))
    with pytest.raises(ConfigError, match="5 GPUs cannot be spread evenly over 2 hosts"):
        lay_out(role("policy", 5, hosts=2), hosts(2, 4))
    with pytest.raises(ResourceError, match="3 hosts with 1 free GPUs each are asked for, and 2 have that"):
        lay_out(role("policy", 3, hosts=3), hosts(2, 4))
    contrary = [*role("policy", 1, devices="a", hosts=1), *role("critic", 1, devices="a", hosts=2)]
    with pytest.raises(ConfigError, match="policy and critic share their devices, but ask for different hosts"):
        lay_out(contrary, hosts(2, 4))


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        (role("rollout", 1, gpus=16), "a worker of rollout needs 16 GPUs, and the largest host has 8"),
        (
            role("policy", 16, together=16),
            "16 ranks of policy must sit on one host, with 16 GPUs, and the largest host has 8",
        ),
        (role("policy", 17), r"the run needs 17 GPU for 17 workers, the cluster has 16: policy 17\."),
        (
            [*role("policy", 6, together=6, devices="a"), *role("rollout", 1, gpus=4, devices="a")],
            "policy and rollout share their devices in groups of 12 GPUs",
        ),
    ],
)
def test_what_no_host_can_hold_is_refused_with_the_numbers(plans, message):
    with pytest.raises(ResourceError, match=message):
        lay_out(plans, hosts(2, 8))


def test_a_worker_without_gpu_shares_none():
    with pytest.raises(ConfigError, match="rollout needs no GPU, so it cannot share those of policy"):
        lay_out([*role("policy", 1, devices="a"), *role("rollout", 1, gpus=0, devices="a")], hosts(1, 1))
    layout = lay_out([*role("policy", 1), *role("rollout", 1, gpus=0)], hosts(1, 1))
    assert seats(layout, "rollout") == [("h0", ())]


def test_on_cpus_workers_take_cores():
    plans = [*role("policy", 4, gpus=0, cpus=1.0), *role("rollout", 2, gpus=0, cpus=2.0)]
    layout = lay_out(plans, hosts(2, 0, cpus=4.0))
    assert {bundle.host.name: bundle.cpus for bundle in layout.bundles} == {"h0": 4.0, "h1": 4.0}
    with pytest.raises(ResourceError, match="the run needs 8 CPU for 6 workers, the cluster has 7"):
        lay_out(plans, [Host(name="a", cpus=4.0), Host(name="b", cpus=3.0)])
