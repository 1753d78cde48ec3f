from dataclasses import replace

import pytest
from rlhf_algos import from_mapping
from rlhf_core import ResourceError
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement.layout import Host
from rlhf_launch.planning.command import planned
from rlhf_launch.planning.devices import DEVICES, device_named
from rlhf_launch.planning.report import refuse_what_does_not_fit


@pytest.fixture
def config(llama_7b):
    """PPO of LLaMA2 7B on GPUs of its own for each role; only the configuration of the model is there."""
    settings = {
        "model": llama_7b,
        "data": {"train": "prompts.jsonl"},
        "reward": {"function": "rlhf_rollout:math_answer"},
        "algorithm": {"name": "grpo"},
        "rollout": {"backend": "vllm", "engines": 2, "samples_per_prompt": 4, "sampling": {"max_tokens": 1024}},
        "train": {"engine": "deepspeed", "ranks": 4, "gradient_checkpointing": True},
        "placement": {"device": "cuda", "executor": "ray"},
    }
    return from_mapping(OnlineConfig, settings, source="test")


HOSTS = [Host(name="one", gpus=16)]


def test_7b_trains_on_four_large_gpus_and_on_no_small_ones(config):
    found = planned(config, HOSTS, device="a800")
    policy = next(one for one in found.fit.roles if one.role == "policy")
    # Weights, float32 gradients, masters and moments: 2 + 4 + 4 + 8 bytes a parameter over four ranks, and buckets.
    assert policy.engine.resident == pytest.approx(18 * 6.738e9 / 4, rel=0.02)
    assert not found.fit.too_large
    refuse_what_does_not_fit(found.fit)
    small = planned(config, HOSTS, device="rtx-4090")
    with pytest.raises(ResourceError, match=r"policy need .* GiB on a GPU .*offload_optimizer=true"):
        refuse_what_does_not_fit(small.fit)


def test_what_may_just_fit_is_said_and_not_refused(config):
    found = planned(config, HOSTS, device="a800").fit
    policy = next(one for one in found.sets if "policy" in one.roles)
    tight = replace(found, device=replace(found.device, memory=int(policy.peak * 0.95)), sets=(policy,))
    assert tight.too_large == ()
    assert tight.close == (policy,)
    over = replace(found, device=replace(found.device, memory=int(policy.peak * 0.7)), sets=(policy,))
    assert over.too_large == (policy,)


def test_a_rollout_engine_leaves_its_end_of_the_weight_link_free(config):
    sync = replace(config.weight_sync, transport="nccl", bucket_bytes=1 << 30)
    small, large = (
        next(one for one in planned(given, HOSTS, device="a800").fit.roles if one.role == "rollout")
        for given in (config, replace(config, weight_sync=sync))
    )
    # Two buffers of a bucket and the communicator, in place of as much cache.
    assert large.rollout.link == pytest.approx((2 << 30) + (256 << 20), abs=1024)
    assert small.rollout.budget - large.rollout.budget == large.rollout.link - small.rollout.link
    assert large.rollout.cache_tokens < small.rollout.cache_tokens
    assert max(large.phases.values()) == pytest.approx(0.9 * DEVICES["a800"].memory, abs=2)


def test_nothing_is_refused_where_nothing_is_known_of_the_device_or_there_are_no_gpus(config):
    found = planned(config, HOSTS, device="rtx-4090").fit
    assert found.too_large
    refuse_what_does_not_fit(replace(found, device=None))
    refuse_what_does_not_fit(replace(found, on_gpus=False))


def test_seconds_have_bars_and_a_faster_device_is_faster(config):
    slow, fast = (planned(config, HOSTS, device=name).seconds for name in ("a800", "h100"))
    for phase in ("generation", "training", "step"):
        assert slow[phase].low < slow[phase].value < slow[phase].high
        assert fast[phase].value < slow[phase].value
    text = planned(config, HOSTS, device="a800").text()
    assert "fits on a A800" in text
    assert "published runs" in text


def test_devices_have_the_rates_of_their_data_sheets():
    assert device_named("h100").flops == 989e12
    assert DEVICES["a800"].link < DEVICES["a100"].link
