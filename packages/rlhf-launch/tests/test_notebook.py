"""Whole runs by the public functions, from a cell of a notebook: an event loop is running there."""

import asyncio
import json

import pytest
from rich.console import Console
from rlhf_algos import OfflineConfig, from_mapping, to_plain
from rlhf_launch import GenerateConfig, check_mismatch, generate, train, train_offline

pytestmark = pytest.mark.stack

QUIET = Console(quiet=True)


def in_a_cell(function, *arguments, **options):
    """Call a function as a notebook does."""

    async def cell():
        asyncio.get_running_loop()
        return function(*arguments, **options)

    return asyncio.run(cell())


def test_train_calls_back_and_says_what_it_left(settings, make_config):
    seen = []

    def on_step(step, metrics):
        seen.append((step, metrics["reward"]))
        return step < 2

    config = make_config(settings, train__steps=5, evaluation__every=1)
    result = in_a_cell(train, config, on_step=on_step, console=QUIET)
    assert [step for step, _ in seen] == [1, 2]
    assert result.steps == 2
    assert result.metrics["reward"] == seen[-1][1]
    assert (result.model / "model.safetensors").exists()
    assert [evaluation.step for evaluation in result.evaluations] == [0, 1, 2]
    assert all(evaluation.metrics["dropped_samples"] == 0 for evaluation in result.evaluations)
    assert [len(evaluation.examples) for evaluation in result.evaluations] == [0, 0, 4]
    assert result.seconds["train"] > 0
    resumed = in_a_cell(train, config, resume=True, console=QUIET)
    assert resumed.steps == 5
    rows = map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "reward" in row] == [1, 2, 3, 4, 5]


def test_train_on_episodes(settings, make_config):
    settings["reward"] = {}
    agent = {"environment": "launch_rewards:CountToThree"}
    config = make_config(settings, train__steps=1, rollout__agent=agent, lengths__max_length=80)
    assert in_a_cell(train, config, console=QUIET).steps == 1


def test_generate(settings, make_config, tmp_path):
    config = make_config(settings)
    names = ("model", "data", "lengths", "reward", "rollout", "placement")
    parts = {name: getattr(config, name) for name in names}
    report = in_a_cell(generate, GenerateConfig(output=tmp_path / "samples.jsonl", **parts), console=QUIET)
    assert report.written == 24
    assert 0 <= report.mean_score <= 1


def test_check_mismatch(settings, make_config):
    report = in_a_cell(check_mismatch, make_config(settings), prompts=2, console=QUIET)
    assert report.diagnosis.gap.largest < 1e-4
    assert report.after_sync.largest < 1e-4


def test_train_offline(folder, tmp_path):
    rows = [{"prompt": f"{n}: ", "completion": "yes"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": str(folder / "policy"),
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "algorithm": "sft",
        "output": str(tmp_path / "out"),
        "train": {"engine": "torch", "batch_size": 2},
        "placement": {"executor": "local"},
        "tensorboard": False,
    }
    config = from_mapping(OfflineConfig, settings, source="test")
    assert in_a_cell(train_offline, config).steps == 2
    assert to_plain(config)["algorithm"]["name"] == "sft"


@pytest.mark.parametrize("algorithm", ["remax", "rloo"])
def test_algorithms_that_compare_with_a_greedy_response(settings, make_config, algorithm):
    config = make_config(settings, algorithm=algorithm, rollout__samples_per_prompt=2, train__steps=2)
    result = train(config, console=QUIET)
    assert ("reward_greedy" in result.metrics) is (algorithm == "remax")
    assert result.metrics["grad_norm"] > 0
