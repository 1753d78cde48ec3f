"""A judge is made of pairs, orders answers that it has not seen, and rewards a policy, all in this process."""

import json
import random

import pytest
import yaml
from rich.console import Console
from rlhf_algos import OfflineConfig, from_mapping, read_metrics
from rlhf_algos import train as train_alone
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.cli.main import app
from rlhf_launch.config.generate import GenerateConfig
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.online.run import train
from rlhf_launch.scoring.run import score
from typer.testing import CliRunner

QUIET = Console(quiet=True)
GENERATIVE = {"kind": "generative", "template": "{completion}?", "answers": ["y", "n"], "chat": False}
PAIRWISE = {"kind": "pairwise", "template": "{completion_a}|{completion_b}?", "chat": False}
KINDS = {"generative": GENERATIVE, "pairwise": PAIRWISE}


def texts(count, seed):
    """Pairs of short texts; who likes them, likes those that begin with a letter before m."""
    draw = random.Random(seed)

    def text(letters):
        return draw.choice(letters) + "".join(draw.choice("0123456789") for _ in range(3))

    return [(text("abcdefghijkl"), text("nopqrstuvwxyz")) for _ in range(count)]


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """Judges of both kinds by name, each trained on the rows that the command wrote for it."""
    folder = tmp_path_factory.mktemp("judges")
    save_tiny_model(folder / "base", hidden_size=64)
    pairs = [{"prompt": "Say something: ", "chosen": good, "rejected": bad} for good, bad in texts(300, 0)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    found = {}
    for name, part in KINDS.items():
        run = {"model": str(folder / "base"), "reward": {"parts": {name: {**part, "path": str(folder / name)}}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(run))
        rows = folder / f"{name}.jsonl"
        arguments = [str(folder / f"{name}.yaml"), "--pairs", str(folder / "pairs.jsonl"), "-o", str(rows)]
        result = CliRunner().invoke(app, ["judge-rows", *arguments])
        assert (result.exit_code, f"wrote 600 rows to {rows}" in result.output) == (0, True), result.output
        settings = {
            "model": str(folder / "base"),
            "data": {"train": str(rows)},
            "algorithm": {"name": "sft"},
            "train": {"batch_size": 30, "epochs": 3, "optimizer": {"learning_rate": 2e-3}},
            "tensorboard": False,
            "output": str(folder / f"run-{name}"),
        }
        found[name] = str(train_alone(from_mapping(OfflineConfig, settings, source="test")).model)
    return found


@pytest.mark.stack
@pytest.mark.parametrize("name", KINDS)
def test_a_judge_orders_answers_that_it_has_not_seen(name, judges, folder, tmp_path):
    unseen = texts(40, 1)
    rows = [{"prompt": "Say something: ", "responses": [bad, good]} for good, bad in unseen]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": str(folder / "policy"),
        "data": {"train": str(tmp_path / "answers.jsonl")},
        "reward": {"parts": {name: {**KINDS[name], "path": judges[name]}}},
        "output": str(tmp_path / "scored.jsonl"),
        "train": {"engine": "torch"},
        "placement": {"executor": "local", "device": "cpu"},
    }
    score(from_mapping(GenerateConfig, settings, source="test"), console=QUIET)
    found = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    scores = [[each["score"] for each in row["samples"]] for row in found]
    right = [good > bad for bad, good in scores]
    assert len(right) == len(unseen)
    assert sum(right) / len(right) > 0.9


@pytest.mark.stack
@pytest.mark.parametrize("name", KINDS)
def test_a_policy_learns_what_its_judge_likes(name, judges, settings, make_config):
    settings["reward"] = {"parts": {name: {**KINDS[name], "path": judges[name]}}}
    settings["data"].pop("hold_out")
    settings["rollout"] |= {"samples_per_prompt": 8, "sampling": {"max_tokens": 4}}
    settings["train"] |= {"steps": 12, "prompts_per_step": 8, "optimizer": {"learning_rate": 3e-3}}
    run = train(make_config(settings), console=QUIET)
    rows = read_metrics(run.folder / "metrics.jsonl")
    if name == "generative":
        assert rows[-1]["reward"] > rows[0]["reward"] + 0.1
    else:  # wins of one are losses of another
        assert all(row["reward"] == pytest.approx(0.5, abs=1e-6) for row in rows)
        assert all(row["grad_norm"] > 0 for row in rows[:3])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({**GENERATIVE, "answers": ["yes", "n"]}, "'yes' is 3 tokens"),
        ({**PAIRWISE, "on_failure": {"then": "drop"}}, "on_failure: {then: stop}"),
        ({**GENERATIVE, "template": "{rubric} {completion}"}, "needs the column 'rubric'"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_it_is_loaded(part, message, settings, make_config, folder):
    settings["reward"] = {"parts": {"judge": {**part, "path": str(folder / "policy")}}}
    with pytest.raises(Exception, match=message):
        check_inputs(make_config(settings))


def test_a_judge_among_several_is_named(folder, tmp_path):
    parts = {name: {**part, "path": "judge"} for name, part in KINDS.items()}
    run = {"model": str(folder / "policy"), "reward": {"parts": parts}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    command = ["judge-rows", str(tmp_path / "run.yaml"), "--pairs", str(tmp_path / "pairs.jsonl")]
    rows = tmp_path / "rows.jsonl"
    lost = CliRunner().invoke(app, [*command, "-o", str(rows)])
    assert lost.exit_code != 0
    assert "2 judges" in " ".join(lost.output.split())
    assert not rows.exists()
    found = CliRunner().invoke(app, [*command, "-o", str(rows), "--part", "pairwise"])
    assert found.exit_code == 0, found.output
    assert json.loads(rows.read_text().splitlines()[0]) == {"prompt": "b|c?", "completion": "A"}
    assert CliRunner().invoke(app, [*command, "-o", str(rows)]).exit_code != 0
