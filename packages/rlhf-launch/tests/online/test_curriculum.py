"""A curriculum in a run: checked before anything is loaded, reported, the same after a resume to the last bit."""

import io
import json

import pytest
import torch
import yaml
from rich.console import Console
from rlhf_algos import load_config
from rlhf_core import ConfigError, DataError
from rlhf_launch.config.generate import GenerateConfig, ignored_by_generation
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.online.run import train
from safetensors.torch import load_file

CURRICULUM = {
    "target_success_rate": 0.5,
    "pass_score": 0.3,
    "cooldown_steps": 1,
    "difficulty": {"column": "level", "steps": 3, "start": 0.5},
    "mixture": [{"step": 0, "weights": [4, 1]}, {"step": 4, "weights": [1, 4]}],
}


@pytest.fixture
def learning(settings, tmp_path):
    rows = [[{"prompt": f"{n}+{k}=", "level": (7 * n) % 10} for n in range(10)] for k in (1, 2)]
    for name, part in zip(("ones", "twos"), rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    settings["data"] = {
        "train": [str(tmp_path / "ones.jsonl"), str(tmp_path / "twos.jsonl")],
        "curriculum": CURRICULUM,
    }
    settings["rollout"]["dynamic_sampling"] = {}
    return settings


def left_behind(folder):
    """What became of every prompt, the numbers of the curriculum, and the weights."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    named = [{name: value for name, value in row.items() if name.startswith("curriculum/")} for row in rows]
    weights = load_file(folder / "model" / "model.safetensors")
    return (folder / "samples.jsonl").read_text(), named, torch.cat([w.flatten() for w in weights.values()])


@pytest.mark.stack
def test_a_resumed_run_draws_and_learns_the_same_bits(learning, make_config, tmp_path):
    def run(name, **options):
        config = make_config(
            learning, output=str(tmp_path / name), train={**learning["train"], "steps": 6}, checkpoint={"every": 3}
        )
        return train(config, console=Console(file=io.StringIO()), **options).folder

    samples, named, weights = left_behind(run("whole"))
    run("cut", on_step=lambda step, metrics: step < 3)
    again = left_behind(run("cut", resume=True))
    assert again[0] == samples
    assert again[1] == named
    assert torch.equal(again[2], weights)
    names = {"curriculum/share/ones", "curriculum/share/twos", "curriculum/difficulty", "curriculum/open"}
    assert names | {"curriculum/success_rate", "curriculum/seen", "curriculum/resting"} <= named[-1].keys()
    assert all(row["curriculum/share/ones"] + row["curriculum/share/twos"] == pytest.approx(1) for row in named)
    assert [row["curriculum/open"] for row in named[-3:]] == [1, 1, 1]


def test_a_column_of_difficulty_that_is_not_there_is_refused_before_anything_is_loaded(learning, make_config):
    learning["data"]["curriculum"] = {"difficulty": {"column": "hardness", "steps": 3}}
    with pytest.raises(DataError, match=r"row 1: data.curriculum.difficulty.column .* no column 'hardness'"):
        check_inputs(make_config(learning))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout__samples_per_prompt": 1, "algorithm": "reinforce"},
            "cooldown_steps is about prompts whose samples",
        ),
        (
            {"data__curriculum": {"mixture": [{"step": 0, "weights": [1]}]}},
            r"1 weight\(s\) at step 0 for 2 dataset",
        ),
        ({"data__curriculum": {"target_sucess_rate": 0.5}}, "target_success_rate"),
    ],
)
def test_what_makes_no_sense_is_refused(learning, make_config, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(learning, **changes)


def test_a_curriculum_by_scores_needs_a_reward(learning, make_config):
    del learning["reward"]
    del learning["rollout"]["dynamic_sampling"]
    learning["model"]["teacher"] = learning["model"]["path"]
    learning["algorithm"] = "on_policy_distillation"
    with pytest.raises(
        ConfigError, match="target_success_rate and cooldown_steps go by scores, and there is no reward"
    ):
        make_config(learning)
    paced = {"difficulty": CURRICULUM["difficulty"], "mixture": CURRICULUM["mixture"]}
    assert make_config(learning, data__curriculum=paced).data.curriculum is not None


def test_generation_takes_the_file_of_a_run_with_a_curriculum(learning, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(learning | {"output": str(tmp_path / "out.jsonl")}))
    config = load_config(GenerateConfig, file, [], ignore=ignored_by_generation())
    assert len(config.data.train) == 2
