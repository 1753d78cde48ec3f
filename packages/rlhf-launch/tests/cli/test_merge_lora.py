"""`rlhf merge-lora` on what a run with adapters exported."""

import pytest
from rlhf_core import EngineConfig, LoraConfig, Loss, OptimizerConfig
from rlhf_core.testing.engine_ground import forward, rows, supervised_loss
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch.cli.main import app
from typer.testing import CliRunner


def test_an_export_is_merged_again(tmp_path):
    pytest.importorskip("peft")
    from rlhf_algos import TorchEngine

    base = save_tiny_model(tmp_path / "base", tied=False)
    optimizer = OptimizerConfig(learning_rate=0.01)
    engine = TorchEngine(EngineConfig(model=base, optimizer=optimizer, lora=LoraConfig(rank=4)))
    engine.step(rows(0), Loss(function=supervised_loss))
    (tmp_path / "run").mkdir()
    engine.export(tmp_path / "run")
    done = CliRunner().invoke(app, ["merge-lora", str(tmp_path / "run"), "-o", str(tmp_path / "merged")])
    assert done.exit_code == 0, done.output
    assert "14 layers merged" in done.output
    expected = engine.score(rows(0)).log_probs
    assert (forward(str(tmp_path / "merged"), rows(0))[0] - expected).abs().max() < 1e-4


def test_a_wrong_adapter_ends_in_one_line(tmp_path):
    done = CliRunner().invoke(app, ["merge-lora", str(tmp_path), "-o", str(tmp_path / "merged")])
    assert done.exit_code == 2
    assert "no adapter in" in done.output
