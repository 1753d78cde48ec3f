"""`rlhf generate`: what a row holds, every backend, and going on after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from rlhf_algos import DataSource, from_mapping, load_config
from rlhf_core import ConfigError, DataError, RewardError, RolloutConfig
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_launch.cli.main import app
from rlhf_launch.config.generate import GenerateConfig, ignored_by_generation
from rlhf_launch.config.reward import RewardSection
from rlhf_launch.generation.run import generate
from rlhf_rollout import AgentConfig
from typer.testing import CliRunner

QUIET = Console(quiet=True)
SLOW_REWARD = "import time\ndef slow(completion, answer):\n    time.sleep(0.15)\n    return float(len(answer))\n"


@pytest.fixture
def config(settings, tmp_path):
    """Three samples for each of 24 prompts, from a file written for training."""
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(settings))
    changes = [f"output={tmp_path / 'out' / 'samples.jsonl'}", "rollout.samples_per_prompt=3"]
    return load_config(GenerateConfig, path, changes, ignore=ignored_by_generation())


def read(config):
    with open(config.output) as lines:
        return {row["prompt_id"]: row for row in map(json.loads, lines)}


def test_a_row_holds_tokens_log_probs_reasons_and_scores(config):
    report = generate(config, console=QUIET)
    rows = read(config)
    assert sorted(rows, key=int) == [str(n) for n in range(24)]
    assert (report.prompts, report.written, report.found) == (24, 24, 0)
    row = rows["3"]
    assert (row["prompt"], row["columns"]) == ("3+3=", {"answer": "6"})
    assert row["prompt_token_ids"] == byte_tokenizer()("3+3=")["input_ids"]
    assert row["log_prob_meaning"]["temperature"] == 1.0
    assert len(row["samples"]) == 3
    for sample in row["samples"]:
        assert len(sample["token_ids"]) == len(sample["log_probs"]) == len(sample["weight_versions"]) <= 8
        assert sample["finish_reason"] in ("stop", "length")
        text = byte_tokenizer().decode(sample["token_ids"], skip_special_tokens=True)
        assert sample["text"] == text
        assert sample["score"] == sum(c.isalnum() for c in text) / max(1, len(text))
    scores = [sample["score"] for row in rows.values() for sample in row["samples"]]
    assert report.mean_score == pytest.approx(sum(scores) / len(scores))
    assert report.tokens == sum(len(s["token_ids"]) for row in rows.values() for s in row["samples"])


def test_without_a_reward_there_are_no_scores(config):
    report = generate(replace(config, reward=None), console=QUIET)
    assert report.mean_score is None
    assert "score" not in read(config)["0"]["samples"][0]


@pytest.mark.stack
def test_killed_and_started_again_it_writes_what_an_uninterrupted_run_writes(config, settings, tmp_path):
    (tmp_path / "slow_rewards.py").write_text(SLOW_REWARD)
    settings = settings | {"reward": {"function": "slow_rewards:slow"}}
    settings["rollout"] = settings["rollout"] | {"samples_per_prompt": 3, "max_num_seqs": 3}
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(settings))
    output = tmp_path / "cut.jsonl"
    command = [sys.executable, "-c", "from rlhf_launch.cli.main import main; main()"]
    command += ["generate", "slow.yaml", "--output", str(output)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if output.exists() and output.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    complete = output.read_bytes().count(b"\n")
    assert 3 <= complete < 24
    with output.open("ab") as file:
        file.write(b'{"prompt_id": "23", "prompt_tok')
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    assert f"{complete} of 24 prompts are done already" in again.stdout
    assert f"{24 - complete} rows written" in again.stdout
    generate(replace(config, reward=None), console=QUIET)
    whole, resumed = read(config), read(replace(config, output=output))
    assert output.read_bytes().count(b"\n") == 24
    for prompt_id, row in whole.items():
        found = resumed[prompt_id]["samples"]
        assert [s["token_ids"] for s in found] == [s["token_ids"] for s in row["samples"]]
        assert {s["score"] for s in found} == {float(len(row["columns"]["answer"]))}


def test_a_torn_last_line_is_dropped_with_or_without_its_end(config):
    generate(config, console=QUIET)
    path = config.output
    lines = Path(path).read_bytes().splitlines(keepends=True)
    for torn in (b'{"prompt_id": "9"', b"\x00\x00\x00\n"):
        Path(path).write_bytes(b"".join(lines[:10]) + torn)
        assert generate(config, console=QUIET).found == 10
        assert len(read(config)) == 24


def test_a_row_that_is_not_ours_in_the_middle_is_an_error(config):
    generate(config, console=QUIET)
    lines = Path(config.output).read_bytes().splitlines(keepends=True)
    Path(config.output).write_bytes(lines[0] + b"oops\n" + lines[1])
    with pytest.raises(DataError, match="row 2 was not written"):
        generate(config, console=QUIET)


def test_a_finished_file_starts_no_engine(config):
    generate(config, console=QUIET)
    report = generate(config, console=QUIET)
    assert (report.written, report.found, report.tokens) == (0, 24, 0)


def test_rows_of_other_settings_or_data_do_not_mix(config, tmp_path):
    generate(config, console=QUIET)
    with pytest.raises(ConfigError, match=r"begun with seed=0, now it is 1"):
        generate(replace(config, seed=1), console=QUIET)
    data = Path(config.data.train[0].path).read_text().replace("3+3=", "3+4=")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(data)
    beside = f"{config.output}.settings.json"
    other = replace(config, data=replace(config.data, train=(DataSource(path=str(prompts)),)))
    settings = json.loads(Path(beside).read_text()) | {"prompts": other.settings()["prompts"]}
    Path(beside).write_text(json.dumps(settings))
    with pytest.raises(DataError, match="its row 3 belongs to another prompt"):
        generate(other, console=QUIET)
    stranger = tmp_path / "notes.jsonl"
    stranger.write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="not written by this command"):
        generate(replace(config, output=stranger), console=QUIET)


def test_a_failing_reward_keeps_what_was_finished(config):
    from rlhf_launch.config.run import RewardSection

    broken = replace(config, reward=RewardSection(function="launch_rewards:raises"))
    with pytest.raises(RewardError, match="no network today"):
        generate(broken, console=QUIET)
    assert read(config) == {}


def test_rewards_of_several_kinds_with_a_reward_model(config, folder):
    parts = {
        "rm": {"kind": "model", "path": str(folder / "reward"), "weight": 0.5},
        "same": {"kind": "exact"},
        "steps": {"kind": "steps", "path": str(folder / "reward"), "placeholder": "<|step|>", "separator": "e"},
        "digits": {"kind": "function", "function": "launch_rewards:digits"},
    }
    reward = from_mapping(RewardSection, {"parts": parts}, source="test")
    report = generate(replace(config, reward=reward), console=QUIET)
    samples = [sample for row in read(config).values() for sample in row["samples"]]
    assert report.written == 24
    assert len({sample["score_components"]["rm"] for sample in samples}) > 1
    for sample in samples:
        found = sample["score_components"]
        assert found["digits/length"] == len(sample["text"])
        assert 0 <= found["steps"] <= 1
        assert found["steps/steps"] >= 0
        total = 0.5 * found["rm"] + found["same"] + found["steps"] + found["digits"]
        assert sample["score"] == pytest.approx(total)
    with pytest.raises(ConfigError, match="was begun with reward="):
        generate(config, console=QUIET)


def test_samples_that_the_reward_policy_drops_have_their_reason(config):
    reward = {"function": "launch_rewards:raises", "on_failure": {"then": "drop", "attempts": 1}}
    report = generate(replace(config, reward=from_mapping(RewardSection, reward, source="test")), console=QUIET)
    assert report.mean_score is None
    samples = [sample for row in read(config).values() for sample in row["samples"]]
    assert len(samples) == 72
    assert all(sample["score"] is None and "no network today" in sample["score_error"] for sample in samples)


def test_a_context_without_room_is_refused(config):
    with pytest.raises(ConfigError, match="max_length=10 is less than the 24 tokens"):
        replace(config, lengths=replace(config.lengths, max_length=10))


def test_episodes_are_not_for_this_command(config):
    rollout = replace(config.rollout, agent=AgentConfig(environment="launch_rewards:CountToThree"))
    with pytest.raises(ConfigError, match=r"leave rollout\.agent out"):
        replace(config, rollout=rollout)


def test_a_file_that_is_completed_needs_the_seeds_of_its_samples(config):
    with pytest.raises(ConfigError, match=r"leave rollout\.request_seeds=false out"):
        replace(config, rollout=replace(config.rollout, request_seeds=False))


def test_flags_are_enough(folder, tmp_path):
    output = tmp_path / "flags.jsonl"
    flags = ["--model", str(folder / "policy"), "--prompts", str(folder / "prompts.jsonl"), "-o", str(output)]
    flags += ["--max-tokens", "4", "--backend", "transformers", "--temperature", "0", "data.train.limit=5"]
    result = CliRunner().invoke(app, ["generate", *flags])
    assert result.exit_code == 0, result.output
    assert "5 rows written" in result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {len(row["samples"]) for row in rows} == {1}
    result = CliRunner().invoke(app, ["generate", "--model", "x"])
    assert result.exit_code == 2
    assert "missing data, output" in result.output


def test_through_an_openai_compatible_server(config, folder, monkeypatch):
    from rlhf_rollout import Gateway, GatewayConfig, TransformersBackend

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    served = TransformersBackend(RolloutConfig(model=str(folder / "policy"), max_model_len=64))
    settings = GatewayConfig(model="policy", max_model_len=64, api_key="secret")
    with Gateway(served, byte_tokenizer(), settings) as gateway:
        options = {"base_url": gateway.url, "served_model": "policy", "log_probs": "processed"}
        remote = replace(
            config,
            output=Path(f"{config.output}.remote"),
            rollout=replace(config.rollout, backend="openai", options=options),
        )
        generate(remote, console=QUIET)
    served.close()
    generate(config, console=QUIET)
    here, there = read(config), read(remote)
    for prompt_id, row in here.items():
        assert [s["token_ids"] for s in there[prompt_id]["samples"]] == [s["token_ids"] for s in row["samples"]]


@pytest.mark.stack
def test_with_vllm(config):
    vllm = replace(config, rollout=replace(config.rollout, backend="vllm"))
    generate(vllm, console=QUIET)
    rows = read(vllm)
    assert len(rows) == 24
    assert all(len(row["samples"]) == 3 for row in rows.values())
