"""Whole chains in this process: SFT, a reward model and PPO, with the torch engine and the Transformers backend."""

import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rlhf_algos import from_mapping
from rlhf_core import ConfigError, DataError, PluginError, RunStopped, StopRequest
from rlhf_launch.chain.config import ChainConfig
from rlhf_launch.chain.run import read_chain, run_chain
from rlhf_launch.cli.main import app
from typer.testing import CliRunner

EXAMPLE = Path(__file__).parents[4] / "examples" / "chain"


def quiet():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def task(tmp_path, monkeypatch):
    """The example's task, importable by its reward's name; works in a directory of the test."""
    if not EXAMPLE.exists():
        pytest.skip("the examples are not beside the packages here")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("task", EXAMPLE / "task.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "task", module)
    spec.loader.exec_module(module)
    return module


def metric_rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.stack
def test_the_true_reward_rises_though_only_choices_of_an_annotator_were_seen(task):
    task.write_task(Path("runs/chain-data"))
    config = read_chain(EXAMPLE / "chain.yaml", ["stages.ppo.train.steps=18", "stages.ppo.evaluation.every=0"])
    result = run_chain(config, console=quiet())
    assert list(result.stages) == ["sft", "rm", "ppo"]
    assert result.stages["rm"].metrics["eval/accuracy"] > 0.6
    rows = metric_rows(result.folder / "ppo")
    held_out = [row["eval/unseen/reward/true"] for row in rows if "eval/unseen/reward/true" in row]
    assert held_out[-1] > held_out[0] + 0.12  # of SFT, and after PPO: answers to prompts that were in no training
    steps = [row["reward/true"] for row in rows if "reward/true" in row]
    assert sum(steps[-3:]) / 3 > sum(steps[:3]) / 3 + 0.12
    assert all(row["ptx_loss"] > 0 for row in rows if "ptx_loss" in row)
    assert (result.folder / "chain.json").exists()


@pytest.fixture
def chain(folder, tmp_path):
    """A function that makes a chain of three short stages."""
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    pairs = [{"prompt": f"{n}:", "chosen": "a" * (1 + n % 3), "rejected": "b"} for n in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    offline = {"command": "offline", "lengths": {"max_length": 24}, "tensorboard": False}
    train = {"engine": "torch", "batch_size": 2, "steps": 2}

    def make(**overrides):
        stages = {
            "sft": {
                **offline,
                "algorithm": "sft",
                "model": str(folder / "policy"),
                "data": {"train": str(tmp_path / "text.jsonl")},
                "train": {**train, "optimizer": {"learning_rate": 1e-3}},
            },
            "rm": {
                **offline,
                "algorithm": "rm",
                "model": "stage.sft",
                "data": {"train": str(tmp_path / "pairs.jsonl"), "hold_out": 2},
                "train": train,
            },
            "ppo": {
                "command": "train",
                "algorithm": {"name": "ppo"},
                "model": "stage.sft",
                "data": {"train": str(folder / "prompts.jsonl")},
                "lengths": {"max_prompt_tokens": 16},
                "reward": {"model": "stage.rm.best"},
                "rollout": {"backend": "transformers", "samples_per_prompt": 1, "sampling": {"max_tokens": 4}},
                "train": {"engine": "torch", "prompts_per_step": 4, "steps": 1, "max_tokens_per_micro_batch": 256},
                "placement": {"executor": "local", "device": "cpu"},
                "tensorboard": False,
            },
        }
        for key, value in overrides.items():
            name, _, field = key.partition("__")
            stages[name] = {**stages[name], field: value}
        return from_mapping(ChainConfig, {"stages": stages, "output": str(tmp_path / "chain")}, source="test")

    return make


@pytest.mark.stack
def test_what_is_done_is_skipped_and_what_was_broken_off_goes_on(chain, tmp_path):
    stop = StopRequest()
    broken = chain(ppo__reward={"function": "launch_rewards:raises"})
    with pytest.raises(Exception, match="no network today") as caught:
        run_chain(broken, console=quiet())
    assert "the chain is at the stage 'ppo'; --resume continues with it" in caught.value.__notes__
    records = {name: json.loads((tmp_path / "chain" / name / "stage.json").read_text()) for name in ("sft", "rm")}
    assert not (tmp_path / "chain" / "ppo" / "stage.json").exists()
    assert not (tmp_path / "chain" / "chain.json").exists()
    with pytest.raises(ConfigError, match=r"holds the stage\(s\) sft, rm, ppo .* --resume .* --overwrite"):
        run_chain(chain(), console=quiet())
    # The stage that was broken off is the run that it was: its settings are those that it began with.
    with pytest.raises(ConfigError, match=r"reward\.function"):
        run_chain(chain(), resume=True, console=quiet())
    (tmp_path / "chain" / "ppo").rename(tmp_path / "broken")
    result = run_chain(chain(), resume=True, console=quiet())
    assert result.skipped == ("sft", "rm")
    assert result.stages["ppo"].inputs == {name: records[name]["run_id"] for name in ("sft", "rm")}
    assert result.model == tmp_path / "chain" / "ppo" / "model"
    assert (result.model / "config.json").exists()
    # Done is done: other settings are another stage, another run of SFT leaves no reward model of it.
    with pytest.raises(ConfigError, match=r"'sft' is done with other settings: .*train\.steps was 2, is 3"):
        run_chain(chain(sft__train={"engine": "torch", "batch_size": 2, "steps": 3}), resume=True, console=quiet())
    (tmp_path / "chain" / "sft").rename(tmp_path / "old-sft")
    with pytest.raises(ConfigError, match=r"'rm' was done with another run of the stage 'sft'"):
        run_chain(chain(), resume=True, console=quiet())
    stop.ask("enough")
    with pytest.raises(RunStopped):
        run_chain(chain(), overwrite=True, console=quiet(), stop=stop)
    (aside,) = tmp_path.glob("chain.2*")
    assert (aside / "rm" / "stage.json").exists()


def test_all_stages_are_checked_before_the_first_one_runs(chain, tmp_path):
    prompts = {"train": str(tmp_path / "none.jsonl")}
    with pytest.raises(DataError, match=r"none\.jsonl") as caught:
        run_chain(chain(ppo__data=prompts), console=quiet())
    assert "in stages.ppo of the chain" in caught.value.__notes__
    with pytest.raises(PluginError, match="no_such_function"):
        run_chain(chain(ppo__reward={"function": "launch_rewards:no_such_function"}), console=quiet())
    with pytest.raises(DataError, match="nothing to resume"):
        run_chain(chain(), resume=True, console=quiet())
    assert not (tmp_path / "chain").exists()


def test_the_command(tmp_path):
    (tmp_path / "chain.yaml").write_text("stages: {sft: {command: offlin}}\n")
    found = CliRunner().invoke(app, ["chain", str(tmp_path / "chain.yaml")])
    assert found.exit_code == 2
    assert "write offline (sft, rm, dpo, ...)" in found.output
