"""`rlhf iterate` on a tiny model whose task can be checked: begin with the first digit of the prompt."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from rlhf_algos import from_mapping
from rlhf_core import ConfigError, DataError
from rlhf_launch.quickstart.arithmetic import make_model
from rlhf_launch.rounds.config import RoundsConfig
from rlhf_launch.rounds.run import iterate
from safetensors.torch import load_file

QUIET = Console(quiet=True)
KILLING = """
import os, signal
from pathlib import Path
from rlhf_algos import sft, SFTConfig

calls = 0

def begins_with(completions, *, answer, **columns):
    global calls
    calls += 1
    fuse = Path("kill-after")
    if fuse.exists() and calls > int(fuse.read_text()):
        fuse.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(text.startswith(gold)) for text, gold in zip(completions, answer, strict=True)]

steps = 0

def sft_in_steps(outputs, batch, config: SFTConfig):
    global steps
    steps += 1
    fuse = Path(__file__).with_name("fail-after")
    if fuse.exists() and steps > int(fuse.read_text()):
        fuse.unlink()
        raise RuntimeError("no more steps today")
    return sft(outputs, batch, config)
"""
PROMPTS = 60


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A random model with one token per character, and prompts."""
    folder = tmp_path_factory.mktemp("rounds")
    make_model(folder / "model", seed=0, hidden_size=64, layers=2)
    for name, others in (("train", range(6)), ("held-out", range(6, 10))):
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a)} for a in range(10) for b in others]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(inputs, output, **changes):
    return {
        "model": str(inputs / "model"),
        "data": {"train": str(inputs / "train.jsonl")},
        "output": str(output),
        "rounds": 2,
        "reward": {"function": "launch_rewards:begins_with"},
        "rollout": {"backend": "transformers", "samples_per_prompt": 16, "sampling": {"max_tokens": 3}},
        "algorithm": {"name": "sft"},
        "train": {"engine": "torch", "batch_size": 16, "epochs": 6, "optimizer": {"learning_rate": 3e-3}},
        "evaluation": {"data": str(inputs / "held-out.jsonl"), "samples": 8},
        "placement": {"executor": "local", "device": "cpu"},
        "tensorboard": False,
    } | changes


def run(given, **start):
    return iterate(from_mapping(RoundsConfig, given, source="test"), console=QUIET, **start)


def rewards(result):
    return [each.metrics["eval/reward"] for each in result.rounds]


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_rejection_sampling_raises_the_true_reward(inputs, tmp_path):
    result = run(settings(inputs, tmp_path / "run"))
    before, first, second = rewards(result)
    assert before < 0.1
    assert first > before + 0.05
    assert second > first + 0.1
    assert result.model == str(tmp_path / "run" / "round-02" / "train" / "model")
    written = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["round"] for row in written] == [0, 1, 2]
    assert written[2]["eval/reward"] == second
    chosen, samples = (rows_of(tmp_path / "run" / "round-01" / f"{name}.jsonl") for name in ("chosen", "samples"))
    best = {row["prompt_id"]: max(sample["score"] for sample in row["samples"]) for row in samples}
    assert [row["score"] for row in chosen] == [best[row["prompt_id"]] for row in chosen]
    # The second round samples from what the first one made, with draws of its own.
    manifest = json.loads((tmp_path / "run" / "round-02" / "round.json").read_text())
    assert manifest["begun_from"] == str(tmp_path / "run" / "round-01" / "train" / "model")


@pytest.mark.parametrize("reference", ["round", "first"])
def test_iterative_dpo_raises_the_true_reward(inputs, tmp_path, reference):
    train = {"engine": "torch", "batch_size": 16, "epochs": 8, "optimizer": {"learning_rate": 3e-3}}
    changes = {"select": {"kind": "pairs"}, "algorithm": {"name": "dpo", "beta": 0.1}, "train": train}
    result = run(settings(inputs, tmp_path / "run", reference=reference, **changes))
    before, first, second = rewards(result)
    assert first > before + 0.05
    assert second > first + 0.05
    config = yaml.safe_load((tmp_path / "run" / "round-02" / "train" / "config.yaml").read_text())
    expected = {"round": None, "first": str(inputs / "model")}
    assert config["model"]["reference"] == expected[reference]
    assert config["model"]["path"] == str(tmp_path / "run" / "round-01" / "train" / "model")


def test_conditional_sft_asks_for_the_highest_level_from_the_second_round_on(inputs, tmp_path):
    rule = {"kind": "conditional", "levels": 2, "template": "{prompt}{attributes}="}
    given = settings(inputs, tmp_path / "run", select=rule, scoring="after", lengths={"max_prompt_tokens": 8})
    run(given | {"train": given["train"] | {"epochs": 1}})
    folder = tmp_path / "run"
    first, second = (rows_of(folder / f"round-0{n}" / "samples.jsonl") for n in (1, 2))
    assert first[0]["prompt"] == "0+0="
    assert second[0]["prompt"] == "0+0=score:2="
    assert second[0]["prompt_source"] == "0+0="
    assert "score" not in second[0]["samples"][0]
    chosen = rows_of(folder / "round-02" / "chosen.jsonl")
    assert len(chosen) == 16 * PROMPTS
    scored = {row["prompt_id"]: row for row in rows_of(folder / "round-02" / "scored.jsonl")}
    asked = [f"0+0=score:{1 + int(sample['score'])}=" for sample in scored["0"]["samples"]]
    assert [row["prompt"] for row in chosen[:16]] == asked
    held_out = rows_of(folder / "round-01" / "evaluation" / "samples" / "round-01.jsonl")
    assert all(row["prompt"].endswith("=score:2=") for row in held_out)


@pytest.mark.stack
def test_killed_in_the_second_round_it_goes_on_to_the_same_model(inputs, tmp_path, monkeypatch):
    """Once in the middle of the samples, once in the middle of the training."""
    (tmp_path / "killing.py").write_text(KILLING)
    changes = {
        "reward": {"function": "killing:begins_with"},
        "algorithm": {"name": "sft", "loss_function": "killing:sft_in_steps"},
        "train": {"engine": "torch", "batch_size": 16, "epochs": 2, "optimizer": {"learning_rate": 3e-3}},
        "checkpoint": {"every": 1},
        "evaluation": {},
    }
    for name in ("whole", "cut"):
        given = settings(inputs, tmp_path / name, **changes)
        given["rollout"] = given["rollout"] | {"samples_per_prompt": 4, "max_num_seqs": 8}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(given))

    command = [sys.executable, "-c", "from rlhf_launch.cli.main import main; main()", "iterate", "cut.yaml"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    (tmp_path / "kill-after").write_text(str(PROMPTS + PROMPTS // 2))
    killed = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, timeout=200)
    assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / "cut"
    assert (folder / "round-01" / "round.json").exists()
    complete = (folder / "round-02" / "samples.jsonl").read_bytes().count(b"\n")
    assert 0 < complete < PROMPTS
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fail-after").write_text("3")
    cut, whole = (yaml.safe_load((tmp_path / f"{name}.yaml").read_text()) for name in ("cut", "whole"))
    with pytest.raises(RuntimeError, match="no more steps today") as failed:
        run(cut, resume=True)
    assert "--resume goes on from there" in failed.value.__notes__[-1]
    assert [path.name for path in (folder / "round-02" / "train" / "checkpoints").glob("step-*")]
    assert not (folder / "round-02" / "train" / "model").exists()
    run(cut, resume=True)
    run(whole)
    for number in (1, 2):
        first, second = (tmp_path / name / f"round-0{number}" for name in ("whole", "cut"))
        assert (first / "chosen.jsonl").read_bytes() == (second / "chosen.jsonl").read_bytes()
        left, right = (load_file(path / "train" / "model" / "model.safetensors") for path in (first, second))
        assert all(left[name].equal(right[name]) for name in left)


def test_complete_rounds_are_kept_and_more_can_follow(inputs, tmp_path):
    given = settings(inputs, tmp_path / "run", rounds=1, evaluation={})
    given["train"] = given["train"] | {"epochs": 1}
    run(given)
    with pytest.raises(ConfigError, match=r"holds 1 round\(s\) and metrics of an earlier run; write --resume"):
        run(given)
    with pytest.raises(ConfigError, match="cannot go on, it would be another one"):
        run(given | {"seed": 1}, resume=True)
    before = (tmp_path / "run" / "round-01" / "round.json").read_bytes()
    result = run(given | {"rounds": 2}, resume=True)
    assert [each.number for each in result.rounds] == [1, 2]
    assert (tmp_path / "run" / "round-01" / "round.json").read_bytes() == before
    (tmp_path / "run" / "round-02" / "round.json").write_text("{}")
    with pytest.raises(DataError, match="is not the manifest of a round"):
        run(given | {"rounds": 2}, resume=True)


def test_nothing_chosen_stops_the_round_and_names_the_prompts(inputs, tmp_path):
    rule = {"kind": "threshold", "threshold": 2.0}
    with pytest.raises(DataError, match=r"nothing is left to train on.*60 prompts gave none, none above 2: 0, 1,"):
        run(settings(inputs, tmp_path / "run", select=rule, evaluation={}))
