import json
from pathlib import Path

import pytest
import torch
from rlhf_algos import from_mapping, read_metrics
from rlhf_core import CapabilityError, ConfigError, EngineConfig
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.cli.offline import offline
from rlhf_launch.offline.run import PlacedEngine, ScaledOfflineConfig, ScaleSection, train_offline
from rlhf_launch.placement.executor import LocalExecutor
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline")
    save_tiny_model(folder / "model", hidden_size=32)
    rows = [{"prompt": f"{i}: say ", "chosen": "yes" * (1 + i % 3), "rejected": "no"} for i in range(7)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(inputs, output, **scale):
    return {
        "model": str(inputs / "model"),
        "train": [{"path": str(inputs / "pairs.jsonl")}],
        "eval": [{"path": str(inputs / "pairs.jsonl")}],
        "output": str(output),
        "reference_cache": str(output / "references"),
        "batch_size": 4,
        "learning": {"learning_rate": 1e-3},
        "evaluation": {"batch_size": 6},
        "checkpoint": {"every": 1},
        "tensorboard": False,
        "scale": scale,
    }


def configure(*args, **scale):
    return from_mapping(ScaledOfflineConfig, settings(*args, **scale), source="test")


def numbers(output):
    names = ("loss", "grad_norm", "eval/loss", "eval/accuracy")
    return [[row[name] for name in names if name in row] for row in read_metrics(Path(output) / "metrics.jsonl")]


def alone(inputs, output, **changes):
    """The same run in this process, by rlhf-algos alone."""
    from rlhf_algos import OfflineConfig, train

    plain = {name: value for name, value in settings(inputs, output).items() if name != "scale"}
    train(from_mapping(OfflineConfig, plain | changes, source="test"))
    return numbers(output)


def test_a_placed_engine_gives_the_run_of_an_engine_in_this_process(inputs, tmp_path):
    result = train_offline(configure(inputs, tmp_path / "placed", engine="torch", executor="local"))
    assert result.steps == 2
    assert numbers(tmp_path / "placed") == alone(inputs, tmp_path / "alone")


def test_it_is_chosen_by_what_is_there():
    assert not ScaleSection().on_ray
    assert ScaleSection(ranks=2).on_ray
    assert ScaleSection(ray_address="auto").on_ray
    assert not ScaleSection(ray_address="auto", executor="local").on_ray
    assert ScaleSection(engine="my_engine:Engine").engine_name == "my_engine:Engine"
    with pytest.raises(ConfigError, match="needs ray"):
        ScaleSection(ranks=2, executor="local")
    with pytest.raises(ConfigError, match="at least 1"):
        ScaleSection(ranks=0)


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


def test_a_batch_of_fewer_units_than_ranks_is_scored(inputs, monkeypatch):
    from rlhf_core.testing.engine_ground import rows

    monkeypatch.setattr("rlhf_launch.placement.plans.TrainWorker", Rank)
    engine = PlacedEngine(
        EngineConfig(model=str(inputs / "model")), ScaleSection(ranks=3, engine="torch"), LocalExecutor()
    )
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
    file.write_text(yaml.safe_dump(settings(inputs, tmp_path / "out", executor="local")))
    ran = CliRunner().invoke(app, ["dpo", str(file), "scale.engine=torch", "max_steps=1"])
    assert ran.exit_code == 0, ran.output
    assert "1 steps" in ran.output
    assert (tmp_path / "out" / "model" / "config.json").exists()
    shown = CliRunner().invoke(app, ["kto", str(file), "--print-config", "scale.ranks=1"])
    assert yaml.safe_load(shown.output)["method"] == "kto"
    wrong = CliRunner().invoke(app, ["dpo", str(file), "scale.rank=3"])
    assert wrong.exit_code == 2
    assert "'scale.ranks'" in " ".join(wrong.output.split())


@pytest.mark.stack
def test_two_zero_3_ranks_placed_by_ray_equal_one_process(inputs, tmp_path):
    config = configure(inputs, tmp_path / "ray", ranks=2)
    assert config.scale.engine_name == "deepspeed"
    result = train_offline(config)
    assert result.steps == 2
    for placed, single in zip(numbers(tmp_path / "ray"), alone(inputs, tmp_path / "alone"), strict=True):
        assert placed == pytest.approx(single, rel=1e-3)
    assert sorted(path.name for path in (tmp_path / "ray" / "checkpoints").iterdir()) == ["step-1", "step-2"]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(result.model)
