"""The published layouts as files that resolve to them; what a plan says, and refuses, without a cluster."""

import re
from pathlib import Path

import pytest
from rlhf_algos import from_mapping
from rlhf_launch.cli.main import app
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement import fill
from rlhf_launch.placement.layout import Host
from rlhf_launch.placement.plans import rollout_plans
from rlhf_launch.placement.resolve import ResolvedBackends
from typer.testing import CliRunner

EXAMPLES = Path(__file__).parents[4] / "examples" / "placement"
EIGHT = "0-1 2-3 4-5 6-7"
EVERYONE = ("policy", "critic", "reference", "reward model")
LAYOUTS = {
    "7b-separate": {
        "policy": {1: "0-3"},
        "critic": {1: "4-7"},
        "reference": {2: "4-5"},
        "reward model": {2: "6-7"},
        "rollout": {2: "0-3"},
    },
    "13b-separate": {
        "policy": {1: "0-7"},
        "critic": {2: "0-7"},
        "reference": {4: "0-3"},
        "reward model": {4: "4-7"},
        "rollout": {3: "0-7"},
    },
    "34b-separate": {
        "policy": {2: "0-7"},
        "critic": {3: "0-7"},
        "reference": {4: "0-3"},
        "reward model": {4: "4-7"},
        "rollout": {1: EIGHT},
    },
    "70b-separate": {
        "policy": {3: "0-3"},
        "critic": {3: "4-7"},
        "reference": {4: "0-3"},
        "reward model": {4: "4-7"},
        "rollout": {1: "0-3 4-7", 2: "0-3 4-7"},
    },
    "70b-pairs": {
        "policy": {2: "0-3"},
        "critic": {2: "4-7"},
        "reference": {2: "0-3"},
        "reward model": {2: "4-7"},
        "rollout": {1: EIGHT},
    },
    **{
        f"{size}-colocated": {
            **{role: dict.fromkeys(range(1, hosts + 1), "0-7") for role in EVERYONE},
            "rollout": dict.fromkeys(range(1, hosts + 1), engines),
        }
        for size, hosts, engines in (("7b", 2, "0-7"), ("13b", 4, "0-7"), ("34b", 4, EIGHT), ("70b", 4, "0-3 4-7"))
    },
}


OVER_TWO_HOSTS = ["placement.rollout.hosts_per_engine=2", "rollout.pipeline_parallel_size=2"]


def plan(*arguments):
    result = CliRunner().invoke(app, ["train", *arguments, "--print-plan"])
    return result.exit_code, result.output


def cells(table):
    return [re.split(r"\s{2,}", line.strip()) for line in table.strip().splitlines()]


@pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not beside the packages here")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_resolves_to_its_table(name):
    expected = LAYOUTS[name]
    hosts = max(host for role in expected.values() for host in role)
    code, text = plan(str(EXAMPLES / f"{name}.yaml"), "--hosts", str(hosts), "--gpus-per-host", "8")
    assert code == 0, text
    assert text.startswith(f"{hosts} host(s), {8 * hosts} of {8 * hosts} GPUs")
    table, *turns = text.split("\non shared devices, ")
    assert bool(turns) == name.endswith(("pairs", "colocated"))
    rows = cells(table)[3:]
    found: dict = {}
    for role, _, host, gpus, *_ in rows:
        found.setdefault(role, {})[int(host.removeprefix("host "))] = gpus
    assert found == expected
    lines = {row[0]: " ".join(row) for row in rows}
    assert all("stage=3 offload_optimizer=true" in lines[role] for role in ("policy", "critic", "reference"))
    if name.endswith("pairs"):
        assert ("reference" in lines["policy"], "reward model" in lines["critic"]) == (True, True)
        assert "offload_parameters=true" in lines["reward model"]
        assert "offload_parameters" not in lines["policy"]


@pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not beside the packages here")
def test_every_example_has_its_table():
    assert {path.stem for path in EXAMPLES.glob("*.yaml") if re.match(r"\d+b-", path.stem)} == set(LAYOUTS)


@pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not beside the packages here")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["rollout.tensor_parallel_size=16"], "a worker of rollout needs 16 GPUs, and the largest host has 8"),
        (["train.ranks=16", "train.sequence_parallel_size=16"], "16 ranks of policy must sit on one host"),
        (["train.options.zero_hpz_partition_size=3"], "4 rank(s) cannot be cut into groups of 3"),
        (["train.ranks=64"], "the run needs 136 GPU for 200 workers, the cluster has 32"),
        (["placement.reference.hosts=3"], "4 GPUs cannot be spread evenly over 3 hosts"),
        (["placement.reference.colocate_with=critik"], "colocate_with='critik' is no role"),
        (
            ["placement.rollout.hosts_per_engine=2"],
            "divides the pipeline stages of an engine among its hosts, and rollout.pipeline_parallel_size is 1",
        ),
        (
            [*OVER_TWO_HOSTS, "placement.rollout.hosts=4"],
            "placement.rollout.hosts=4 how many all have",
        ),
        (
            [*OVER_TWO_HOSTS, "rollout.backend=transformers"],
            "the rollout backend transformers keeps an engine on one",
        ),
        (
            [*OVER_TWO_HOSTS, "placement.policy.colocate_with=rollout"],
            "an engine over several hosts has devices of its own",
        ),
        (["placement.reward.moodel.ranks=2"], "the reward has no part of this name"),
        (["placement.policy.ranks=2"], "has another name now; write train.ranks"),
        (
            ["algorithm.name=grpo", "rollout.samples_per_prompt=4"],
            "placement.reward.model.colocate_with: this run has",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(changes, message):
    code, text = plan(str(EXAMPLES / "70b-pairs.yaml"), *changes, "--hosts", "4")
    assert code == 2
    assert message in " ".join(text.split())


@pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not beside the packages here")
def test_each_part_of_an_engine_over_two_hosts_has_a_row():
    changes = [*OVER_TWO_HOSTS, "rollout.engines=2", "rollout.tensor_parallel_size=8"]
    code, text = plan(str(EXAMPLES / "70b-separate.yaml"), *changes, "--hosts", "6", "--gpus-per-host", "8")
    assert code == 0, text
    rows = [row[1:4] for row in cells(text) if row[0] == "rollout"]
    assert rows == [
        ["0 (part 1 of 2)", "host 1", "0-7"],
        ["0 (part 2 of 2)", "host 2", "0-7"],
        ["1 (part 1 of 2)", "host 3", "0-7"],
        ["1 (part 2 of 2)", "host 4", "0-7"],
    ]


def config(**changes):
    settings = {"model": "m", "data": {"train": "a.jsonl"}, "reward": {"function": "m:f"}}
    settings["algorithm"] = {"name": "grpo", "kl_coef": 0.1}
    return from_mapping(OnlineConfig, settings | changes, source="test")


def engine_configs(**changes):
    run = config(**changes)
    backends = ResolvedBackends(
        engine="torch", backend="vllm", executor="local", device="cpu", dtype="float32", reasons=()
    )
    return [plan.arguments[1] for plan in rollout_plans(run, backends, weights=run.weight_sync)]


def test_engines_whose_requests_have_no_seeds_draw_from_streams_of_their_own():
    seeded = engine_configs(rollout={"engines": 3}, seed=5)
    assert [one.seed for one in seeded] == [5, 5, 5]
    free = {"engines": 3, "request_seeds": False}
    seeds = [one.seed for one in engine_configs(rollout=free, seed=5)]
    assert len(set(seeds)) == 3
    assert seeds == [one.seed for one in engine_configs(rollout=free, seed=5)]
    assert not set(seeds) & {one.seed for one in engine_configs(rollout=free, seed=6)}
    run = config(rollout=free, seed=5)
    assert (run.request_seed, config(seed=5).request_seed) == (None, 5)


def test_engines_are_told_to_keep_their_cache():
    kept = engine_configs(rollout={"overlap": {}}, weight_sync={"keep_kv_cache": True})
    assert [one.keep_kv_cache for one in (*kept, *engine_configs())] == [True, False]


def hosts(count, gpus):
    return [Host(name=f"h{i}", gpus=gpus) for i in range(count)]


@pytest.mark.parametrize(("there", "gpus"), [((1, 1), 1), ((1, 2), 2), ((1, 4), 4), ((1, 8), 8), ((4, 8), 32)])
def test_a_run_that_says_nothing_fills_the_gpus_in_turns(there, gpus):
    chosen, why = fill.filled(config(), hosts(*there))
    assert (chosen.train.ranks, chosen.rollout.engines) == (gpus, gpus)
    assert chosen.shared == (frozenset({"policy", "reference", "rollout"}),)
    assert f"{gpus} GPU(s) on {there[0]} host(s): every role on all of them, in turns" in why
    assert fill.filled(chosen, hosts(*there)) == (chosen, None)


def test_where_generation_overlaps_training_each_has_half():
    chosen, _ = fill.filled(config(rollout={"overlap": {}, "tensor_parallel_size": 2}), hosts(2, 8))
    assert (chosen.train.ranks, chosen.rollout.engines) == (8, 4)
    assert chosen.shared == (frozenset({"policy", "reference"}),)
    one = config(rollout={"overlap": {}})
    assert fill.filled(one, hosts(1, 1)) == (one, None)


def test_ranks_have_a_sample_each():
    chosen, _ = fill.filled(config(train={"prompts_per_step": 2, "minibatches": 4}), hosts(1, 8))
    assert chosen.train.ranks == 4  # 2 prompts x 8 samples in 4 minibatches
    assert chosen.rollout.engines == 8


def test_what_says_where_is_left_as_it_is():
    for written in (
        config(train={"ranks": 2}),
        config(rollout={"engines": 2}),
        config(placement={"layout": "written"}),
        config(placement={"reference": {"ranks": 2}}),
    ):
        assert fill.filled(written, hosts(1, 8)) == (written, None)
    torch_engine = config(train={"engine": "torch"})
    assert fill.filled(torch_engine, hosts(1, 8)) == (torch_engine, None)
    assert fill.filled(config(), hosts(2, 0)) == (config(), None)
    cannot_sleep = config(rollout={"backend": "transformers"})
    assert fill.filled(cannot_sleep, hosts(1, 8)) == (cannot_sleep, None)
