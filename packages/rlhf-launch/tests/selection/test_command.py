"""`rlhf select`, and that `rlhf offline` trains on what it writes and on what `rlhf generate` writes."""

import json
from dataclasses import replace

import pytest
from rich.console import Console
from rlhf_algos import SELECTION_RULES, OfflineConfig, from_mapping
from rlhf_core import DataError
from rlhf_launch.cli.main import app
from rlhf_launch.config.generate import GenerateConfig
from rlhf_launch.generation.run import generate
from rlhf_launch.offline.run import train_offline
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def samples(folder, tmp_path_factory):
    """Files of 1, 2 and 4 samples of each prompt, as `rlhf generate` writes them."""
    output = tmp_path_factory.mktemp("samples")
    settings = {
        "model": str(folder / "policy"),
        "data": {"train": str(folder / "prompts.jsonl")},
        "reward": {"function": "launch_rewards:share_of_alphanumerics"},
        "rollout": {"backend": "transformers", "samples_per_prompt": 1, "sampling": {"max_tokens": 8}},
        "placement": {"executor": "local", "device": "cpu"},
        "output": str(output / "1.jsonl"),
    }
    config = from_mapping(GenerateConfig, settings, source="test")
    for count in (1, 2, 4):
        rollout = replace(config.rollout, samples_per_prompt=count)
        path = output / f"{count}.jsonl"
        generate(replace(config, rollout=rollout, output=path), console=Console(quiet=True))
    return output


def train(method, data, folder, output):
    model = folder / ("reward" if method == "rm" else "policy")
    settings = {
        "model": str(model),
        "data": {"train": str(data)},
        "algorithm": {"name": method},
        "train": {"engine": "torch", "steps": 1, "batch_size": 4},
        "placement": {"executor": "local", "device": "cpu"},
        "reference_cache": str(output / "references"),
        "output": str(output / "run"),
        "tensorboard": False,
    }
    return train_offline(from_mapping(OfflineConfig, settings, source="test"))


def select(*arguments):
    return CliRunner().invoke(app, ["select", *map(str, arguments)])


RULES = {
    "best_of_n": ["k=2"],
    "threshold": ["threshold=0.2"],
    "quantile": ["quantile=0.5"],
    "pairs": ["rejected=random", "min_margin=0.1"],
    "labels": [],
    "conditional": ["levels=3"],
}


@pytest.mark.parametrize(
    ("kind", "method"), [(kind, method) for kind, rule in SELECTION_RULES.items() for method in rule.methods
                         if method in ("sft", "dpo", "rm", "kto")]
)  # fmt: skip
def test_what_is_chosen_is_trained_on_as_it_is(samples, folder, tmp_path, kind, method):
    output = tmp_path / "chosen.jsonl"
    done = select(kind, samples / "4.jsonl", *RULES[kind], "-o", output)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    report = json.loads((tmp_path / "chosen.jsonl.report.json").read_text())
    assert report["rule"]["kind"] == kind
    assert (report["prompts"], report["answers"], report["rows"]) == (24, 96, len(rows))
    assert ("prompt_template='{}" in done.output) == (kind == "conditional")
    assert train(method, output, folder, tmp_path).steps == 1


@pytest.mark.parametrize(("count", "method"), [(1, "sft"), (2, "dpo"), (2, "rm"), (2, "kto")])
def test_samples_that_can_mean_one_thing_train_as_they_are(samples, folder, tmp_path, count, method):
    assert train(method, samples / f"{count}.jsonl", folder, tmp_path).steps == 1


@pytest.mark.parametrize(("count", "method"), [(2, "sft"), (4, "sft"), (1, "dpo"), (4, "dpo"), (4, "kto")])
def test_samples_that_can_mean_several_things_are_refused_with_the_command_that_chooses(
    samples, folder, tmp_path, count, method
):
    with pytest.raises(DataError, match=rf"row 1 has {count} samples of its prompt.*`rlhf select "):
        train(method, samples / f"{count}.jsonl", folder, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["best", "4.jsonl", "-o", "a.jsonl"], "select.kind must be one of best_of_n"),
        (["best_of_n", "4.jsonl", "n=3", "-o", "a.jsonl"], "unknown key 'select.n'"),
        (["threshold", "4.jsonl", "-o", "a.jsonl"], "missing select.threshold"),
        (["best_of_n", "4.jsonl"], "there is no file to write"),
        (["best_of_n", "4.jsonl", "-o", "4.jsonl"], "exists; give another name"),
        (["best_of_n", "none.jsonl", "-o", "a.jsonl"], "does not exist"),
        (["best_of_n", "4.jsonl", "by=helpful", "-o", "a.jsonl"], "answers have no 'helpful'"),
    ],
)
def test_what_cannot_be_is_refused(samples, monkeypatch, arguments, message):
    monkeypatch.chdir(samples)
    done = select(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert not (samples / "a.jsonl").exists()
