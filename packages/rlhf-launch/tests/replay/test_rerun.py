"""Whole replays: a run of the torch engine in this process, its steps taken again."""

import io
import shutil

import pytest
from rich.console import Console
from rlhf_algos import from_mapping
from rlhf_core import ConfigError, DataError
from rlhf_launch.bundles.bundle import read_bundle
from rlhf_launch.cli.main import app
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.online.run import train
from rlhf_launch.online.trainer import Trainer
from rlhf_launch.replay.rerun import replay_step
from typer.testing import CliRunner

pytestmark = pytest.mark.stack


def quiet():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def kept(folder, tmp_path_factory):
    """The settings of a run that kept all its steps and checkpoints."""
    return {
        "model": {"path": str(folder / "policy")},
        "data": {"train": str(folder / "prompts.jsonl")},
        "lengths": {"max_prompt_tokens": 16},
        "reward": {"function": "launch_rewards:share_of_alphanumerics"},
        "algorithm": {"name": "ppo", "kl_coef": 0.05},
        "rollout": {"backend": "transformers", "samples_per_prompt": 4, "sampling": {"max_tokens": 8}},
        "train": {
            "engine": "torch",
            "prompts_per_step": 4,
            "steps": 3,
            "minibatches": 2,
            "epochs_per_step": 2,
            "optimizer": {"learning_rate": 1e-3},
            "critic_optimizer": {"learning_rate": 1e-3},
        },
        "placement": {"executor": "local", "device": "cpu"},
        "checkpoint": {"every": 1, "keep": 9},
        "bundles": {"every": 1},
        "output": str(tmp_path_factory.mktemp("kept") / "run"),
    }


@pytest.fixture(scope="module")
def bundles(kept):
    return train(from_mapping(OnlineConfig, kept, source="test")).folder / "bundles"


def names(found):
    return {parting.name: parting for parting in found.partings}


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_same_settings_give_the_same_bits(bundles, step):
    found = replay_step(bundles / f"step-{step:06d}", console=quiet())
    assert found.equal
    assert found.first is None
    compared = names(found)
    assert {"old_log_probs", "ref_log_probs", "values", "advantages", "returns"} <= set(compared)
    assert {"policy/loss", "policy/entropy", "critic/loss", "policy/grad_norm", "critic/grad_norm"} <= set(compared)
    assert compared["policy"].stage == compared["critic"].stage == "weights"
    assert len(read_bundle(bundles / f"step-{step:06d}").reports["policy"]) == 4


def test_without_packing_only_rounding_differs(bundles):
    found = replay_step(bundles / "step-000002", ["train.packing=false"], console=quiet())
    assert found.first is None
    assert not found.equal
    assert 0 < names(found)["old_log_probs"].largest < 1e-5
    strict = replay_step(bundles / "step-000002", ["train.packing=false"], tolerance=1e-9, console=quiet())
    assert strict.first.name == "old_log_probs"
    assert strict.first.where.startswith("sample ")
    assert ", token " in strict.first.where


def test_another_algorithm_parts_where_it_is_another(bundles):
    found = replay_step(bundles / "step-000002", ["algorithm=dapo"], console=quiet())
    assert names(found)["old_log_probs"].equal
    assert found.first.name == "advantages"


def test_another_dtype_is_compared_up_to_the_first_gradient(bundles):
    found = replay_step(bundles / "step-000002", ["model.dtype=bfloat16"], console=quiet())
    assert found.tolerance == 5e-2
    assert 1e-4 < names(found)["old_log_probs"].largest < 0.5
    assert "policy/grad_norm" in names(found)
    assert "policy" not in names(found)
    assert any("optimizer is not carried over" in note for note in found.notes)


def test_other_minibatches_have_losses_of_their_own(bundles):
    found = replay_step(bundles / "step-000002", ["train.minibatches=1"], console=quiet())
    assert names(found)["advantages"].equal
    assert "policy/loss" not in names(found)
    assert any("minibatches are others" in note for note in found.notes)


def test_older_weights_part_at_once(bundles):
    older = bundles.parent / "checkpoints" / "step-000001"
    found = replay_step(bundles / "step-000003", weights=older, console=quiet())
    assert found.first.name == "old_log_probs"
    with pytest.raises(DataError, match="neither a checkpoint"):
        replay_step(bundles / "step-000003", weights=bundles, console=quiet())


def test_bundles_that_carry_weights_need_no_checkpoint(kept, make_config, tmp_path):
    """State: the same bits up to the gradient, there being no next checkpoint. Models: from the first minibatch."""
    for kind in ("state", "model"):
        output = tmp_path / kind
        settings = kept | {"output": str(output), "bundles": {"steps": [2], "weights": kind}}
        settings["train"] = kept["train"] | {"steps": 2}
        train(make_config(settings))
        shutil.rmtree(output / "checkpoints")
        found = replay_step(output / "bundles" / "step-000002", console=quiet())
        assert found.equal, kind
        assert found.weights == ("the bundle's own state" if kind == "state" else "the bundle's own models")
        assert "policy/grad_norm" in names(found)
        assert "policy" not in names(found)


def test_adapters_are_replayed_from_their_checkpoint(kept, make_config, folder, tmp_path):
    model = {"path": str(folder / "policy"), "lora": {"rank": 4}}
    settings = kept | {"output": str(tmp_path / "lora"), "model": model, "algorithm": {"name": "grpo"}}
    run = train(make_config(settings))
    assert replay_step(run.folder / "bundles" / "step-000003", console=quiet()).equal


def test_the_command_says_where_the_numbers_part(bundles):
    bundle = str(bundles / "step-000002")
    done = CliRunner().invoke(app, ["replay", bundle])
    assert done.exit_code == 0, done.output
    assert "bit-equal" in done.output
    done = CliRunner().invoke(app, ["replay", bundle, "train.packing=false", "--tolerance", "1e-9"])
    assert done.exit_code == 1
    assert "the numbers part first in model outputs: old_log_probs" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no bundle in"),
        (["BUNDLE", "train.packin=false"], "train.packin"),
        (["BUNDLE", "model.path=gone/away/far"], "does not exist"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(bundles, arguments, message, monkeypatch):
    def load(*_):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("rlhf_launch.workers.train_rank.TrainWorker.start", load)
    arguments = [str(bundles / "step-000002") if argument == "BUNDLE" else argument for argument in arguments]
    done = CliRunner().invoke(app, ["replay", *arguments])
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")


def test_an_unknown_setting_is_refused(bundles):
    with pytest.raises(ConfigError, match="unknown key"):
        replay_step(bundles / "step-000001", ["no.such=1"], console=quiet())


def test_a_step_that_failed_is_kept_and_fails_again(kept, make_config, tmp_path, monkeypatch):
    """The critic's values are spoilt on their way into the step."""
    score = Trainer.score

    def spoilt(self, *given):
        scored = score(self, *given)
        return scored.with_columns(values=scored["values"] * float("nan"))

    monkeypatch.setattr(Trainer, "score", spoilt)
    with pytest.raises(ValueError, match="advantages are not finite"):
        train(make_config(kept | {"output": str(tmp_path / "bad"), "bundles": {}}))
    bundle = read_bundle(tmp_path / "bad" / "bundles" / "step-000001")
    assert (bundle.why, list(bundle.faults)) == ("fault", ["values of 16 row(s) are not finite"])
    again = replay_step(bundle, console=quiet())
    assert again.error == bundle.error
    assert names(again)["values"].equal
    monkeypatch.undo()
    healed = replay_step(bundle, console=quiet())
    assert healed.error is None
    assert healed.first.name == "values"
