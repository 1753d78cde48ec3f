"""`rlhf eval` with tiny models in this process."""

import json
import shutil

import pytest
from rlhf_core import ConfigError
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.cli.main import app
from rlhf_launch.evaluation.labels import labels
from rlhf_launch.named_models import find_model
from typer.testing import CliRunner

SMALL = [
    "--samples",
    "4",
    "--k",
    "1,4",
    "--max-tokens",
    "6",
    "--backend",
    "transformers",
    "--set",
    "placement.device=cpu",
]
REWARD = ["--reward-function", "launch_rewards:share_of_alphanumerics", "--pass-score", "0.3"]


@pytest.fixture
def inputs(folder, tmp_path):
    """Two data sets, a second model inside a run's directory."""
    rows = [json.dumps({"prompt": f"{n}-{n}=", "answer": "0"}) + "\n" for n in range(5)]
    (tmp_path / "minus.jsonl").write_text("".join(rows))
    lines = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "plus.jsonl").write_text("".join(lines[:3]))
    save_tiny_model(tmp_path / "trained" / "model", seed=7)
    return tmp_path


def evaluate(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_models_and_sets_make_a_table_and_a_second_call_generates_nothing(folder, inputs):
    data = ["--data", inputs / "plus.jsonl", "--data", inputs / "minus.jsonl"]
    arguments = [folder / "policy", inputs / "trained", *data, *REWARD, *SMALL, "-o", inputs / "out"]
    done = evaluate(*arguments)
    assert done.exit_code == 0, done.output
    content = json.loads((inputs / "out" / "results.json").read_text())
    found = content["results"]
    assert [(r["model"], r["data"], r["prompts"], r["samples"]) for r in found] == [
        ("policy", "plus", 3, 12),
        ("policy", "minus", 5, 20),
        ("trained", "plus", 3, 12),
        ("trained", "minus", 5, 20),
    ]
    samples = [inputs / "out" / "samples" / f"{name}.jsonl" for name in ("policy", "trained")]
    before = [file.read_bytes() for file in samples]
    assert before[0] != before[1]
    rows = [json.loads(line) for line in before[0].splitlines()]
    scores = [s["score"] for row in rows if row["prompt"][1] == "-" for s in row["samples"]]
    assert found[1]["reward"] == pytest.approx(sum(scores) / len(scores))
    assert found[1]["pass@1"] == pytest.approx(sum(score > 0.3 for score in scores) / len(scores))
    # What an interruption left is completed, to the same bytes but for the order.
    samples[0].write_bytes(b"".join(before[0].splitlines(keepends=True)[:3]))
    (inputs / "out" / "results.json").unlink()
    again = evaluate(*arguments)
    assert again.exit_code == 0, again.output
    assert "3 of 8 prompts are done already" in again.output
    assert "8 of 8 prompts are done already" in again.output
    assert samples[1].read_bytes() == before[1]
    assert json.loads((inputs / "out" / "results.json").read_text()) == content
    summed = evaluate("--samples-file", samples[0], "--k", "1,4", "--pass-score", "0.3", "-o", inputs / "summed")
    assert summed.exit_code == 0, summed.output
    (whole,) = json.loads((inputs / "summed" / "results.json").read_text())["results"]
    assert (whole["data"], whole["prompts"]) == ("policy", 8)
    assert whole["reward"] == pytest.approx((3 * found[0]["reward"] + 5 * found[1]["reward"]) / 8)


def test_adapters_are_merged_into_their_base(inputs, folder):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "policy")
    settings = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(base, settings).save_pretrained(inputs / "adapters")
    arguments = [inputs / "adapters", "--data", inputs / "plus.jsonl", *REWARD, *SMALL, "-o", inputs / "out"]
    done = evaluate(*arguments)
    assert done.exit_code == 0, done.output
    (merged,) = (inputs / "out" / "merged").iterdir()
    written = (merged / "model.safetensors").stat().st_mtime_ns
    assert evaluate(*arguments).exit_code == 0
    assert (merged / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "1,9"], "give --samples 9"),
        (["--k", "one"], "whole numbers"),
        (["--math"], "two rewards"),
        (["--reward-function", "launch_rewards:needs_gold"], "needs the column 'gold'"),
        (["--samples-file", "x.jsonl"], "leave out the models"),
        (["--step", "3"], "there is no checkpoint"),
    ],
)
def test_bad_input_is_refused_and_writes_nothing(arguments, message, inputs, monkeypatch):
    import launch_rewards

    monkeypatch.setattr(launch_rewards, "needs_gold", lambda completion, gold: 0.0, raising=False)
    data = ["--data", inputs / "plus.jsonl"]
    done = evaluate(
        inputs / "trained", *data, *REWARD, "--backend", "transformers", "-o", inputs / "out", *arguments
    )
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not (inputs / "out" / "samples").exists()


def test_a_second_model_is_checked_before_the_first_generates(inputs, folder):
    broken = inputs / "broken"
    shutil.copytree(folder / "policy", broken)
    for file in broken.glob("*token*"):
        file.unlink()
    data = ["--data", inputs / "plus.jsonl", *REWARD, *SMALL, "-o", inputs / "out"]
    done = evaluate(folder / "policy", broken, *data)
    assert done.exit_code == 2, done.output
    assert "broken" in done.output
    assert not (inputs / "out" / "samples").exists()


def test_what_a_name_stands_for(inputs):
    run = inputs / "trained"
    assert find_model(str(run)).path == str(run / "model")
    assert find_model(str(run / "model")).path == str(run / "model")
    assert find_model("org/name").path == "org/name"
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    with pytest.raises(ConfigError, match="only that trainer can read"):
        find_model(str(run), step=3)
    with pytest.raises(ConfigError, match="only that trainer can read"):
        find_model(str(run / "checkpoints" / "step-000003"))
    with pytest.raises(ConfigError, match="found step-000003"):
        find_model(str(run), step=4)
    (inputs / "begun" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--resume"):
        find_model(str(inputs / "begun"))
    (inputs / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a model"):
        find_model(str(inputs / "empty"))


def test_two_of_one_name_have_their_whole_paths():
    assert labels(["x/a.jsonl", "y/a.jsonl", "b"]) == ["x-a.jsonl", "y-a.jsonl", "b"]
    with pytest.raises(ConfigError, match="given twice"):
        labels(["x/a", "x/a"])
