import json
from pathlib import Path

import pytest
import torch
from rlhf_algos import OfflineConfig, from_mapping, read_metrics, train
from rlhf_core import CapabilityError, ConfigError, EngineConfig
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.cli.offline import offline
from rlhf_launch.offline.run import PlacedEngine, needs_ray, train_offline
from rlhf_launch.placement.executor import LocalExecutor
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline")
    save_tiny_model(folder / "model", hidden_size=32)
    rows = [{"prompt": f"{i}: say ", "chosen": "yes" * (1 + i % 3), "rejected": "no"} for i in range(7)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(inputs, output, *, train=None, placement=None):
    return {
        "model": str(inputs / "model"),
        "data": {"train": str(inputs / "pairs.jsonl")},
        "output": str(output),
        "reference_cache": str(output / "references"),
        "train": {"batch_size": 4, "optimizer": {"learning_rate": 1e-3}, **(train or {})},
        "evaluation": {"data": str(inputs / "pairs.jsonl"), "batch_size": 6},
        "checkpoint": {"every": 1},
        "placement": placement or {},
        "tensorboard": False,
    }


def configure(inputs, output, *, placement=None, **train):
    return from_mapping(OfflineConfig, settings(inputs, output, train=train, placement=placement), source="test")


def numbers(output):
    names = ("loss", "grad_norm", "eval/loss", "eval/accuracy")
    return [[row[name] for name in names if name in row] for row in read_metrics(Path(output) / "metrics.jsonl")]


def alone(inputs, output):
    """The same run in this process, by rlhf-algos alone."""
    train(configure(inputs, output))
    return numbers(output)


def test_a_placed_engine_gives_the_run_of_an_engine_in_this_process(inputs, tmp_path):
    result = train_offline(configure(inputs, tmp_path / "placed", engine="torch", placement={"executor": "local"}))
    assert result.steps == 2
    assert numbers(tmp_path / "placed") == alone(inputs, tmp_path / "alone")


def test_where_the_ranks_run_follows_from_what_is_asked_for(inputs, tmp_path):
    def on_ray(ranks=1, **placement):
        return needs_ray(configure(inputs, tmp_path, ranks=ranks, placement=placement))

    assert not on_ray()
    assert on_ray(ranks=2)
    assert on_ray(ray_address="auto")
    assert not on_ray(ray_address="auto", executor="local")
    with pytest.raises(ConfigError, match="needs ray"):
        train_offline(configure(inputs, tmp_path / "two", ranks=2, placement={"executor": "local"}))
    with pytest.raises(ConfigError, match="at least 1"):
        configure(inputs, tmp_path, ranks=0)


class Rank:
    """Scores every token with its own id; starts nothing."""

    def __init__(self, *_):
        pass

    def score(self, batch, outputs):
        from rlhf_core import ModelOutputs

        assert batch.units
        ids = batch.token_ids.float() * batch.response_mask
        return ModelOutputs(log_probs=ids, candidate_log_probs=torch.stack([ids, -ids], dim=-1))

    def close(self):
        pass


def test_a_batch_of_fewer_units_than_ranks_is_scored(inputs, tmp_path, monkeypatch):
    from rlhf_core.testing.engine_ground import rows

    monkeypatch.setattr("rlhf_launch.placement.plans.TrainWorker", Rank)
    run = configure(inputs, tmp_path, ranks=3, engine="deepspeed")
    engine = PlacedEngine(EngineConfig(model=str(inputs / "model")), run, LocalExecutor())
    batch = rows().select([0])
    found = engine.score(batch, ("log_probs", "candidate_log_probs"))
    assert torch.equal(found.log_probs, batch.token_ids.float() * batch.response_mask)
    assert found.candidate_log_probs.shape == (*batch.token_ids.shape, 2)
    with pytest.raises(CapabilityError, match="export"):
        engine.weights()
    engine.close()
    engine.close()


def test_the_command(inputs, tmp_path):
    import typer
    import yaml

    app = typer.Typer()
    app.command()(offline)
    file = tmp_path / "dpo.yaml"
    file.write_text(yaml.safe_dump(settings(inputs, tmp_path / "out", placement={"executor": "local"})))
    ran = CliRunner().invoke(app, ["dpo", str(file), "train.engine=torch", "train.steps=1"])
    assert ran.exit_code == 0, ran.output
    assert "1 steps" in ran.output
    assert (tmp_path / "out" / "model" / "config.json").exists()
    shown = CliRunner().invoke(app, ["kto", str(file), "--print-config", "train.ranks=1"])
    assert yaml.safe_load(shown.output)["algorithm"]["name"] == "kto"
    wrong = CliRunner().invoke(app, ["dpo", str(file), "train.rank=3"])
    assert wrong.exit_code == 2
    assert "'train.ranks'" in " ".join(wrong.output.split())


@pytest.mark.stack
def test_two_zero_3_ranks_placed_by_ray_equal_one_process(inputs, tmp_path):
    config = configure(inputs, tmp_path / "ray", ranks=2)
    assert config.train.engine_name == "deepspeed"
    result = train_offline(config)
    assert result.steps == 2
    for placed, single in zip(numbers(tmp_path / "ray"), alone(inputs, tmp_path / "alone"), strict=True):
        assert placed == pytest.approx(single, rel=1e-3)
    assert sorted(path.name for path in (tmp_path / "ray" / "checkpoints").iterdir()) == [
        "step-000001",
        "step-000002",
    ]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(result.model)
