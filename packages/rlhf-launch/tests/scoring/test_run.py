"""`rlhf score`: answers from files get scores; no generator is started."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from rlhf_algos import DataSource, from_mapping, read_answers
from rlhf_core import ConfigError, DataError, RewardError
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_launch.cli.main import app
from rlhf_launch.config.generate import GenerateConfig
from rlhf_launch.generation.run import generate
from rlhf_launch.scoring.run import score
from typer.testing import CliRunner

QUIET = Console(quiet=True)
SHARE = {"function": "launch_rewards:share_of_alphanumerics"}
KILLING = """
import os, signal
from pathlib import Path

calls = 0

def length(completion, answer):
    global calls
    calls += 1
    fuse = Path("kill-after")
    if fuse.exists() and calls > int(fuse.read_text()):
        fuse.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(completion))
"""


@pytest.fixture
def make(folder, tmp_path):
    def make(rows, *, reward=SHARE, name="answers.jsonl", **changes):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {
            "model": str(folder / "policy"),
            "data": {"train": str(path)},
            "reward": reward,
            "output": str(tmp_path / "scored.jsonl"),
            "train": {"engine": "torch"},
            "placement": {"executor": "local", "device": "cpu"},
        }
        return from_mapping(GenerateConfig, settings | changes, source="test")

    return make


def rows_of(config):
    return [json.loads(line) for line in Path(config.output).read_text().splitlines()]


@pytest.fixture
def no_generator(monkeypatch):
    """Any rollout engine would be an error."""

    def refuse(*_, **__):
        raise AssertionError("a generator was started")

    monkeypatch.setattr("rlhf_launch.workers.rollout_engine.RolloutWorker.__init__", refuse)


@pytest.mark.usefixtures("no_generator")
def test_every_form_of_answers_gets_scores(make):
    rows = [
        {"prompt": "1+1=", "response": "2!", "answer": "2"},
        {"prompt": "2+2=", "responses": ["4", "??"], "answer": "4"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho."}], "answer": ""},
        {"prompt": [{"role": "user", "content": "Hi"}], "response": [{"role": "assistant", "content": "..."}]},
    ]
    config = make(rows)
    report = score(config, console=QUIET)
    found = sorted(rows_of(config), key=lambda row: int(row["prompt_id"]))
    assert [[s["text"] for s in row["samples"]] for row in found] == [["2!"], ["4", "??"], ["Ho."], ["..."]]
    assert [[s["score"] for s in row["samples"]] for row in found] == [[0.5], [1.0, 0.0], [2 / 3], [0.0]]
    assert (report.written, report.answers, report.dropped) == (4, 5, 0)
    assert found[0]["columns"] == {"answer": "2"}
    assert found[0]["samples"][0]["log_probs"] is None
    assert found[2]["prompt_source"] == [{"role": "user", "content": "Hi"}]
    tokenizer = byte_tokenizer()
    assert found[0]["samples"][0]["token_ids"] == [*tokenizer("2!")["input_ids"], tokenizer.eos_token_id]
    # What was scored can be chosen among, and scored again.
    assert [group.prompt_id for group in read_answers(str(config.output))] == ["0", "1", "2", "3"]
    again = replace(
        config,
        output=Path(f"{config.output}.again"),
        data=replace(config.data, train=(DataSource(path=str(config.output)),)),
    )
    score(again, console=QUIET)
    assert sorted(rows_of(again), key=lambda row: int(row["prompt_id"])) == found


@pytest.mark.usefixtures("no_generator")
def test_parts_of_several_kinds_with_a_reward_model(make, folder):
    parts = {
        "rm": {"kind": "model", "path": str(folder / "reward"), "weight": 0.5},
        "same": {"kind": "exact"},
        "digits": {"kind": "function", "function": "launch_rewards:digits"},
    }
    rows = [
        {"prompt": f"{n}+{n}=", "responses": [str(2 * n), "no", "?" * n], "answer": str(2 * n)} for n in range(1, 9)
    ]
    config = make(rows, reward={"parts": parts})
    score(config, console=QUIET)
    samples = [sample for row in rows_of(config) for sample in row["samples"]]
    assert len({sample["score_components"]["rm"] for sample in samples}) > 12
    for sample in samples:
        found = sample["score_components"]
        assert found["same"] == float(sample["text"].isdecimal())
        assert found["digits/length"] == len(sample["text"])
        assert sample["score"] == pytest.approx(0.5 * found["rm"] + found["same"] + found["digits"])


def test_scores_after_generation_are_those_given_along_with_it(make, folder, tmp_path):
    parts = {"rm": {"kind": "model", "path": str(folder / "reward")}, "share": {"kind": "function", **SHARE}}
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    rollout = {"backend": "transformers", "samples_per_prompt": 3, "sampling": {"max_tokens": 8}}
    along = make(prompts, reward={"parts": parts}, rollout=rollout, output=str(tmp_path / "along.jsonl"))
    generate(along, console=QUIET)
    plain = replace(along, reward=None, output=tmp_path / "plain.jsonl")
    generate(plain, console=QUIET)
    after = make([], reward={"parts": parts}, data={"train": str(plain.output)})
    score(after, console=QUIET)
    first, second = ({row["prompt_id"]: row for row in rows_of(config)} for config in (along, after))
    assert first.keys() == second.keys()
    for name, row in first.items():
        for left, right in zip(row["samples"], second[name]["samples"], strict=True):
            assert right.pop("score") == pytest.approx(left.pop("score"), abs=1e-5)
            assert right.pop("score_components") == pytest.approx(left.pop("score_components"), abs=1e-5)
            # The last bits depend on what happened to share a batch with the sample.
            assert right.pop("log_probs") == pytest.approx(left.pop("log_probs"), abs=1e-4)
        assert row == second[name]


@pytest.mark.stack
def test_killed_and_started_again_nothing_is_lost_or_scored_twice(make, folder, tmp_path, monkeypatch):
    (tmp_path / "killing.py").write_text(KILLING)
    (tmp_path / "kill-after").write_text("700")
    rows = [{"prompt": f"{n}=", "responses": ["1", "22"], "answer": ""} for n in range(600)]
    config = make(rows, reward={"function": "killing:length"})
    program = [sys.executable, "-c", "from rlhf_launch.cli.main import main; main()"]
    flags = [
        "--model",
        str(folder / "policy"),
        "--answers",
        config.data.train[0].path,
        "--reward",
        "killing:length",
    ]
    command = [*program, "score", *flags, "-o", str(config.output)]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    first = subprocess.run(command, cwd=tmp_path, env=env, timeout=100)
    assert first.returncode == -signal.SIGKILL
    complete = Path(config.output).read_bytes().count(b"\n")
    assert 0 < complete < 600
    with open(config.output, "ab") as file:
        file.write(b'{"prompt_id": "599", "prom')
    monkeypatch.syspath_prepend(str(tmp_path))
    again = score(config, console=QUIET)
    assert (again.found, again.written, again.answers) == (complete, 600 - complete, 2 * (600 - complete))
    found = rows_of(config)
    assert sorted(int(row["prompt_id"]) for row in found) == list(range(600))
    assert all([s["score"] for s in row["samples"]] == [1.0, 2.0] for row in found)


def test_rows_of_other_answers_do_not_mix(make):
    score(make([{"prompt": "a", "response": "b", "answer": ""}]), console=QUIET)
    with pytest.raises(ConfigError, match="was begun with answers="):
        score(make([{"prompt": "a", "response": "c", "answer": ""}]), console=QUIET)


def test_an_answer_that_the_reward_drops_has_its_reason(make):
    reward = {"function": "launch_rewards:raises", "on_failure": {"then": "drop", "attempts": 1}}
    config = make([{"prompt": "a", "response": "b", "answer": ""}], reward=reward)
    report = score(config, console=QUIET)
    assert (report.dropped, report.mean_score) == (1, None)
    assert "no network today" in rows_of(config)[0]["samples"][0]["score_error"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, r"row 2 has no answer: it needs the column 'response' or 'responses'"),
        ({"response": "a"}, r"row 2 has no column 'prompt'"),
        ({"prompt": "a", "response": "b", "responses": ["b"]}, "has both 'response' and 'responses'"),
        ({"prompt": "a", "responses": []}, "responses must be a list of texts"),
        ({"prompt": "a", "responses": ["b", 3]}, "row 2: an answer must be text, found '3'"),
        ({"prompt": "", "response": "b"}, "row 2: the prompt is empty"),
        ({"prompt": "a", "response": "b"}, "row 2: the reward 'exact' needs the column 'answer'"),
        (
            {"prompt_id": "0", "prompt": "a", "prompt_token_ids": [5], "samples": []},
            "row 2 is not one of `rlhf gen",
        ),
        (
            {
                "prompt_id": "7",
                "prompt": "a",
                "prompt_token_ids": [68],
                "samples": [{"text": "b", "token_ids": [71], "log_probs": [-1.0], "finish_reason": "stop"}],
            },
            "row 2: the sample 'b' has tokens of another tokenizer",
        ),
    ],
)
def test_bad_rows_are_refused_before_any_model_is_loaded(make, folder, monkeypatch, row, message):
    def refuse(*_, **__):
        raise AssertionError("a model was started")

    monkeypatch.setattr("rlhf_launch.scoring.run.start_workers", refuse)
    parts = {"rm": {"kind": "model", "path": str(folder / "reward")}, "exact": {"kind": "exact"}}
    good = {"prompt": "a", "response": "b", "answer": "c"}
    config = make([good, row], reward={"parts": parts})
    with pytest.raises(DataError, match=message):
        score(config, console=QUIET)
    assert not Path(config.output).exists()


def test_what_the_command_needs(make, folder):
    with pytest.raises(ConfigError, match="there is no reward to score by"):
        score(make([{"prompt": "a", "response": "b"}], reward=None), console=QUIET)
    with pytest.raises(RewardError, match="no network today"):
        score(make([{"prompt": "a", "response": "b"}], reward={"function": "launch_rewards:raises"}), console=QUIET)
    config = make([{"prompt": "a", "response": "b", "answer": ""}])
    two = replace(config, data=replace(config.data, train=config.data.train * 2))
    with pytest.raises(ConfigError, match=r"one dataset; data\.train has 2"):
        score(two, console=QUIET)


def test_the_command_takes_a_file_for_training(make, folder, settings, tmp_path):
    config = make([{"prompt": "a", "response": "b1", "answer": ""}])
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(settings))
    arguments = ["score", str(tmp_path / "train.yaml"), "--answers", config.data.train[0].path]
    done = CliRunner().invoke(app, [*arguments, "-o", str(config.output)])
    assert done.exit_code == 0, done.output
    assert "1 rows written" in done.output
    assert "mean score 1.0000" in done.output
