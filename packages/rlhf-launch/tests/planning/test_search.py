from dataclasses import replace

import pytest
import yaml
from rlhf_algos import from_mapping
from rlhf_core import ConfigError
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement.layout import Host
from rlhf_launch.planning.calibration import Seconds
from rlhf_launch.planning.candidates import Room, device_sets_of, fragment, layouts
from rlhf_launch.planning.devices import DEVICES
from rlhf_launch.planning.search import Searcher, search
from rlhf_launch.planning.search_report import gains, search_text

HOSTS = [Host(name="one", gpus=8), Host(name="two", gpus=8)]
ROLES = ("policy", "critic", "reference", "reward model", "rollout")


@pytest.fixture(scope="module")
def settings(llama_7b):
    """The paper's layout of 7B on 16 GPUs; only the configuration of the model is there."""
    return {
        "model": llama_7b,
        "data": {"train": "prompts.jsonl"},
        "reward": {"model": llama_7b},
        "algorithm": {"name": "ppo", "kl_coef": 0.01},
        "lengths": {"max_prompt_tokens": 1024},
        "rollout": {"backend": "vllm", "engines": 4, "samples_per_prompt": 1, "sampling": {"max_tokens": 1024}},
        "train": {
            "engine": "deepspeed",
            "ranks": 4,
            "prompts_per_step": 1024,
            "gradient_checkpointing": True,
            "max_tokens_per_micro_batch": "auto",
            "options": {"offload_optimizer": True},
        },
        "placement": {
            "device": "cuda",
            "executor": "ray",
            "critic": {"ranks": 4},
            "reference": {"ranks": 2},
            "reward": {"model": {"ranks": 2}},
        },
    }


@pytest.fixture(scope="module")
def config(settings):
    return from_mapping(OnlineConfig, settings, source="test")


@pytest.fixture(scope="module")
def searcher(config):
    return Searcher(config, HOSTS, DEVICES["a800"])


@pytest.fixture(scope="module")
def result(searcher):
    return search(searcher)


def test_the_layout_of_the_paper_is_reproduced_or_beaten(result):
    papers = result.written.seconds["step"].value
    assert result.found[0].plan.seconds["step"].value <= papers
    alone = next(one for one in result.found if one.candidate.grouping == "separate")
    assert alone.plan.seconds["step"].value <= papers


def test_what_is_found_fits_and_is_priced_as_it_is_planned(searcher, result):
    assert {one.candidate.grouping for one in result.found} == {"separate", "pairs", "together"}
    for one in result.found:
        assert all(members.peak <= DEVICES["a800"].memory for members in one.plan.fit.sets)
        fit = searcher.fit(one.candidate)
        assert {members.roles: members.peak for members in fit.sets} == {
            members.roles: members.peak for members in one.plan.fit.sets
        }
        planned = one.plan.seconds
        turns = planned["turns"].value if "turns" in planned else 0.0
        assert searcher.seconds(one.candidate) == pytest.approx(planned["step"].value - turns)


def test_a_fragment_pasted_over_the_file_is_the_layout(settings, config, result):
    def pasted(onto, keys):
        for key, value in keys.items():
            onto[key] = pasted(dict(onto.get(key) or {}), value) if isinstance(value, dict) else value
        return onto

    for one in result.found:
        text = fragment(one.config, config)
        assert from_mapping(OnlineConfig, pasted(dict(settings), yaml.safe_load(text)), source="test") == one.config
        assert text in search_text(result, config)


def test_reasons_are_the_seconds_of_phases_largest_first():
    def seconds(**values):
        return {name: Seconds(value=value, factor=1.5) for name, value in values.items()}

    before = seconds(generation=100.0, training=50.0, scoring=5.0, step=155.0)
    after = seconds(generation=40.0, training=60.0, scoring=5.0, turns=2.0, step=107.0)
    assert gains(before, after) == {"generation": 60.0, "training": -10.0, "turns": -2.0}


def test_roles_share_devices_in_three_ways():
    assert device_sets_of("together", ROLES) == [ROLES]
    assert device_sets_of("pairs", ROLES) == [("policy", "reference"), ("critic", "reward model"), ("rollout",)]
    assert device_sets_of("separate", ("policy", "rollout")) == [("policy",), ("rollout",)]


def test_layouts_fill_the_gpus_and_cut_no_group(config):
    room = Room(gpus=16, host_gpus=8, together=2, heads=12, stages=1)
    found = list(layouts(config, room))
    assert {ways for _, _, _, ways in found} == {1, 2, 4}  # 12 heads are not divided by 8
    for grouping, ranks, engines, ways in found:
        assert all(count % 2 == 0 for count in ranks.values())
        members = device_sets_of(grouping, config.roles)
        if grouping == "together":
            assert set(ranks.values()) == {16}
            assert engines * ways == 16
        else:
            taken = sum(ranks[roles[0]] for roles in members if roles[0] != "rollout")
            assert 16 - ways < taken + engines * ways <= 16


def test_without_gpus_there_is_nothing_to_search(config):
    with pytest.raises(ConfigError, match="searched for GPUs, and there are none"):
        Searcher(
            replace(config, placement=replace(config.placement, device="auto")),
            [Host(name="one")],
            DEVICES["a800"],
        )
