"""What a user sees of mistakes: one message that says what was wrong, what was found, and what to write."""

import json
import subprocess
import sys

import pytest
import yaml
from rlhf_launch.cli.main import app
from typer.testing import CliRunner


@pytest.fixture
def run(settings, tmp_path):
    """`rlhf train` on the settings with dotted changes; returns exit code and everything printed."""

    def run(*overrides, text=None):
        path = tmp_path / "config.yaml"
        path.write_text(text if text is not None else yaml.safe_dump(settings))
        result = CliRunner().invoke(app, ["train", str(path), *overrides])
        return result.exit_code, result.output

    return run


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def mistake(name, overrides, *parts):
    return pytest.param(overrides, parts, id=name)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        mistake("unknown key", ["train.rank=2"], "'train.rank'", "'train.ranks'"),
        mistake("unknown section", ["trian.ranks=2"], "'trian'", "'train'"),
        mistake("wrong type", ["train.ranks=two"], "train.ranks", "whole number", "'two'"),
        mistake("wrong choice", ["algorithm.name=gpro"], "algorithm", "did you mean", "gpro"),
        mistake("impossible value", ["train.steps=0"], "steps must be at least 1, got 0"),
        mistake("one sample", ["rollout.samples_per_prompt=1"], "at least 2"),
        mistake("malformed override", ["train.ranks"], "key=value"),
        mistake("missing data", ["data.train=nowhere.jsonl"], "nowhere.jsonl", "does not exist"),
        mistake("missing column", ["data.train.columns={prompt: question}"], "row 1", "'question'", "'prompt'"),
        mistake("overlong prompt", ["lengths.max_prompt_tokens=2"], "row 1", "lengths.max_prompt_tokens is 2"),
        mistake("no model", ["model.path=./no/such/model"], "model.path", "./no/such/model"),
        mistake("no reward module", ["reward.function=nowhere:f"], "'nowhere'", "cannot be imported"),
        mistake("no reward function", ["reward.function=launch_rewards:raise"], "'raise'", "'raises'"),
        mistake("reward not callable", ["reward.function=launch_rewards:not_a_function"], "not_a_function"),
        mistake("reward signature", ["reward.function=json:loads"], "json:loads", "completions"),
        mistake("unknown backend", ["rollout.backend=vlm"], "'vlm'", "'vllm'"),
        mistake("unknown engine", ["train.engine=deepspede"], "'deepspede'", "'deepspeed'"),
        mistake("ranks without Ray", ["train.ranks=2"], "train.ranks=2", "placement.executor=ray"),
        mistake("no GPU", ["placement.device=cuda"], "no GPU"),
        mistake("too many held out", ["data.hold_out=24"], "24"),
        mistake("no adapters", ["weight_sync.adapters=adapter"], "model.lora is not set"),
        mistake("context", ["lengths.max_length=10"], "lengths.max_length=10", "24"),
    ],
)
def test_a_mistake_ends_in_one_message(run, overrides, parts):
    code, output = run(*overrides)
    assert code == 2
    assert output.startswith("error: ")
    assert "Traceback" not in output
    for part in parts:
        assert part in output


def test_no_reward_at_all(run, settings):
    settings["reward"] = {}
    code, output = run()
    assert code == 2
    assert "reward.function" in output
    assert "reward.model" in output


def test_a_bad_row_is_named(run, tmp_path):
    data = write(tmp_path / "bad.jsonl", {"prompt": "a"}, '{"prompt": \n')
    code, output = run(f"data.train={data}")
    assert code == 2
    assert "bad.jsonl row 2 is not valid JSON" in output


def test_an_empty_file(run, tmp_path):
    code, output = run(f"data.train={write(tmp_path / 'empty.jsonl')}")
    assert code == 2
    assert "no rows" in output


def test_messages_without_a_chat_template(run, tmp_path, folder):
    from rlhf_core.testing.tiny import save_tiny_model
    from transformers import AutoTokenizer

    save_tiny_model(tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    data = write(tmp_path / "chat.jsonl", {"prompt": [{"role": "user", "content": "hi"}]})
    code, output = run(f"data.train={data}", f"model.path={tmp_path / 'plain'}", "data.hold_out=0")
    assert code == 2
    assert "chat.jsonl row 1" in output
    assert "no chat template" in output


def test_a_missing_or_malformed_configuration_file(run, tmp_path):
    result = CliRunner().invoke(app, ["train", str(tmp_path / "nowhere.yaml")])
    assert result.exit_code == 2
    assert "nowhere.yaml" in result.output
    code, output = run(text="model: {path: [unclosed\n")
    assert code == 2
    assert "config.yaml" in output


def test_nothing_to_resume(run):
    code, output = run("--resume")
    assert code == 2
    assert "nothing to resume" in output


def test_print_config_is_complete_and_can_be_read_back(run, settings, tmp_path):
    from rlhf_algos import load_config
    from rlhf_launch.config.run import OnlineConfig

    code, output = run("--print-config", "train.optimizer.learning_rate=3e-5")
    assert code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(output)
    config = load_config(OnlineConfig, path)
    assert config.train.optimizer.learning_rate == 3e-5
    assert config.rollout.sampling.temperature == 1.0


def test_help_reads_well():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for word in ("train", "quickstart", "tiny-model"):
        assert word in result.output


@pytest.mark.stack
def test_mistakes_are_found_before_anything_heavy_is_imported(settings, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    program = (
        "import sys\nfrom rlhf_launch.cli.main import app\n"
        f"try: app(['train', {str(path)!r}, 'train.rank=2'])\n"
        "except SystemExit: pass\n"
        "heavy = {'ray', 'vllm', 'deepspeed', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


class TestTinyModel:
    def write(self, *arguments):
        result = CliRunner().invoke(app, ["tiny-model", *map(str, arguments)])
        return result.exit_code, result.output

    def test_it_writes_over_its_own_and_over_nothing(self, tmp_path):
        assert self.write(tmp_path / "tiny")[0] == 0
        (tmp_path / "empty").mkdir()
        assert self.write(tmp_path / "empty")[0] == 0
        assert self.write(tmp_path / "tiny", "--seed", "1")[0] == 0

    def test_another_model_is_left_alone_unless_the_flag_says_otherwise(self, tmp_path):
        kept = tmp_path / "trained" / "model.safetensors"
        kept.parent.mkdir()
        kept.write_text("days of work")
        code, output = self.write(kept.parent)
        assert code == 2
        assert "did not write" in output
        assert "--overwrite" in output
        assert kept.read_text() == "days of work"
        assert self.write(kept.parent, "--overwrite")[0] == 0

    def test_a_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        code, output = self.write(tmp_path / "file")
        assert code == 2
        assert "is a file" in output


def test_an_address_without_a_cluster_is_refused_before_anything_is_written(run, settings, tmp_path):
    settings["placement"] |= {"executor": "ray", "ray_address": "127.0.0.1:1"}
    code, output = run()
    assert code == 2
    assert output.startswith("error: ")
    assert "nothing answers at 127.0.0.1:1" in output
    assert not (tmp_path / "run").exists()


def test_an_output_that_is_a_file_is_refused(run, settings, tmp_path):
    (tmp_path / "file").write_text("mine")
    settings["output"] = str(tmp_path / "file")
    code, output = run()
    assert code == 2
    assert "Traceback" not in output
    assert "cannot be written" in output
    assert (tmp_path / "file").read_text() == "mine"
