"""Prompts with images: the policy learns from what it sees, and sampler and trainer see the same."""

import asyncio
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import yaml
from PIL import Image
from rlhf_core import (
    CapabilityError,
    ConfigError,
    DataError,
    DroppedSample,
    GenerationResult,
    Sample,
    Trajectory,
)
from rlhf_core.testing.vision import save_tiny_vision_model
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.samples.sampling import episode_sampler, trajectories_of

pytest.importorskip("torchvision")

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
COLOURS = {"r": (210, 30, 30), "b": (30, 30, 210)}


def picture(folder, index, colour):
    """A noisy picture of one colour; its name."""
    noise = np.random.default_rng(index).integers(-30, 30, (56, 56, 3))
    pixels = np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(folder / f"{index}.png")
    return f"{index}.png"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A model with an image encoder, and pictures whose colour is asked for."""
    folder = tmp_path_factory.mktemp("images")
    save_tiny_vision_model(folder / "model", hidden_size=128)  # vLLM on a CPU has no kernel for smaller heads
    colours = random.Random(0).choices("rb", k=32)
    rows = [
        {"prompt": f"{MARK} colour?", "image": picture(folder, index, colour), "colour": colour}
        for index, colour in enumerate(colours)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def looking(settings, seen):
    settings["model"] = {"path": str(seen / "model")}
    settings["data"] = {"train": str(seen / "prompts.jsonl")}
    settings["reward"] = {"function": "launch_rewards:share_of_colour"}
    settings["rollout"] |= {"samples_per_prompt": 8, "sampling": {"max_tokens": 4}}
    settings["train"] |= {"prompts_per_step": 16, "steps": 12, "optimizer": {"learning_rate": 3e-3}}
    settings["lengths"] = {"max_prompt_tokens": 64}
    return settings


def test_a_prompt_has_the_tokens_of_its_images_and_what_an_engine_is_asked_has_one_for_each(looking, make_config):
    inputs = check_inputs(make_config(looking))
    prompt = inputs.prompts.prompts[0]
    assert inputs.backends.images
    assert prompt.shown is not None
    (token,) = prompt.shown.images.token_ids
    assert (prompt.token_ids.count(token), prompt.shown.request_token_ids.count(token)) == (4, 1)
    assert prompt.metadata == {"colour": prompt.metadata["colour"]}
    assert prompt.shown.images.load().tensors["pixel_values"].shape[0] == 16


def test_samples_of_a_prompt_that_the_engine_ran_otherwise_are_refused(looking, make_config):
    prompt = check_inputs(make_config(looking)).prompts.prompts[0]
    sample = Sample(token_ids=(7,), log_probs=(-1.0,), weight_versions=(0,), finish_reason="stop")

    def result(ran):
        return GenerationResult(request_id="0", samples=(sample,), prompt_token_ids=ran)

    (trajectory,) = trajectories_of(prompt, result(prompt.token_ids))
    assert trajectory.prompt_length == len(prompt.token_ids)
    for ran, found in ((None, "does not say"), (prompt.token_ids[1:], r"there, \d+ here")):
        with pytest.raises(CapabilityError, match=f"prompt {prompt.prompt_id}.*{found}.*mm_processor_kwargs"):
            trajectories_of(prompt, result(ran))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"reward": {"model": "{reward}"}}, r"reward\.model: a model that scores responses is shown no images"),
        ({"algorithm": "ppo"}, "rows with images are for a policy or a reference, the role is critic"),
        ({"train__max_tokens_per_micro_batch": "auto"}, "max_tokens_per_micro_batch 'auto' tries rows of text"),
        ({"lengths__max_prompt_tokens": 12}, "with those of its images.*not cut|has 1[0-9] tokens"),
        (
            {"rollout__agent": {"environment": "launch_rewards:CountToThree"}},
            r"rollout\.agent: prompts with images",
        ),
    ],
)
def test_what_would_not_see_the_images_is_refused_before_anything_is_loaded(
    looking, make_config, folder, change, problem
):
    change = json.loads(json.dumps(change).replace("{reward}", str(folder / "reward")))
    with pytest.raises((ConfigError, DataError), match=problem):
        check_inputs(make_config(looking, **change))


def test_a_model_of_text_is_not_asked_about_images(looking, make_config, folder):
    looking["model"] = {"path": str(folder / "policy")}
    with pytest.raises(DataError, match=r"prompts\.jsonl row 1 has image.*as text"):
        check_inputs(make_config(looking))


def test_the_token_of_an_image_in_a_prompt_without_images_is_refused(looking, make_config, seen, tmp_path):
    for name in ("prompts.jsonl", "0.png"):
        (tmp_path / name).write_bytes((seen / name).read_bytes())
    line = (seen / "prompts.jsonl").read_text().splitlines()[0]
    rows = [line] * 16 + [json.dumps({"prompt": f"{MARK} none", "colour": "r"})]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    looking["data"]["train"] = str(tmp_path / "prompts.jsonl")
    with pytest.raises(DataError, match="prompt 16 has the token of an image in its text, and no image"):
        check_inputs(make_config(looking))


@pytest.fixture
def asking(looking, tmp_path):
    """A program shows two pictures in each episode."""
    rows = [{"prompt": f"task {index}", "colours": colours} for index, colours in enumerate(["rb", "br"] * 8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    looking["data"] = {"train": str(tmp_path / "tasks.jsonl")}
    looking["rollout"]["agent"] = {"program": "image_programs:name_colours", "images": True, "max_turns": 2}
    looking["lengths"] = {"max_length": 128}
    del looking["reward"]
    return looking


def test_programs_show_images_to_a_model_that_takes_them(asking, make_config, folder):
    inputs = check_inputs(make_config(asking))
    assert inputs.backends.images
    assert len(inputs.image_token_ids) == 1
    asking["model"] = {"path": str(folder / "policy")}
    with pytest.raises(ConfigError, match=r"rollout\.agent\.images: model .* has no processor that takes images"):
        check_inputs(make_config(asking))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"reward": {"model": "{reward}"}}, r"reward\.model: a model that scores responses is shown no images"),
        ({"algorithm": "ppo"}, "rows with images are for a policy or a reference, the role is critic"),
        (
            {"rollout__agent": {"environment": "launch_rewards:CountToThree", "images": True}},
            "images has no meaning beside environment",
        ),
    ],
)
def test_agents_images_that_a_part_of_the_run_would_not_see_are_refused(
    asking, make_config, folder, change, problem
):
    change = json.loads(json.dumps(change).replace("{reward}", str(folder / "reward")))
    with pytest.raises(ConfigError, match=problem):
        check_inputs(make_config(asking, **change))


def test_an_episode_in_which_the_policy_wrote_an_image_is_left_out_whole():
    def branch(episode, index, sampled):
        return Trajectory(
            sample_id=f"{episode}/{index}",
            group_id="g",
            episode_id=episode,
            token_ids=(1, 9, sampled),
            response_mask=(False, False, True),
            rollout_log_probs=(0.0, 0.0, -1.0),
            weight_versions=(-1, -1, 0),
        )

    class Loop:
        async def run_group(self, task):
            dropped = DroppedSample(sample_id="c", reason="late")
            return [branch("a", 0, 5), branch("a", 1, 9), branch("b", 0, 5), dropped]

    prompt = Prompt(prompt_id="0", text="x", token_ids=(1,))
    drawn = asyncio.run(episode_sampler(Loop(), seed=None, image_token_ids=[9])(prompt, "g", 3))
    assert [one.sample_id for one in drawn] == ["b/0", "c", "a"]
    assert drawn[-1].reason == "the policy wrote the token of an image"


def trained(settings, folder):
    """The steps of a run with vLLM and DeepSpeed."""
    settings["rollout"] |= {"backend": "vllm", "options": {"limit_mm_per_prompt": {"image": 2, "video": 0}}}
    settings["train"] |= {"engine": "deepspeed", "minibatches": 2}
    settings |= {"checkpoint": {"every": 6}, "tensorboard": False, "bundles": {"every": 12}}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    program = "from rlhf_launch.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(folder / "run.yaml")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RLHF_TRACEBACK": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward" in row]
    assert max(row["mismatch/log_prob_max"] for row in rows) < 1e-4
    return rows


@pytest.mark.stack
def test_what_is_on_a_picture_is_learnt_by_vllm_and_deepspeed(looking, tmp_path):
    rewards = [row["reward"] for row in trained(looking, tmp_path)]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2, rewards


@pytest.mark.stack
def test_what_programs_show_is_learnt_through_the_gateway(asking, tmp_path):
    rows = trained(asking, tmp_path)
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2, rewards
