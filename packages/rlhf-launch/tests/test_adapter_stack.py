"""Adapters through the whole loop: two ZeRO-3 ranks, vLLM, and a reference that is the policy without them."""

import json
import os
import subprocess
import sys

import pytest
import yaml

pytestmark = pytest.mark.stack


def test_adapters_are_trained_against_the_model_below_them(settings, tmp_path):
    settings["model"]["lora"] = {"rank": 8}
    settings["algorithm"] = {"name": "grpo", "kl_coef": 0.05}
    settings["rollout"] |= {"backend": "vllm"}
    settings["train"] |= {"engine": "deepspeed", "ranks": 2, "optimizer": {"learning_rate": 0.02}}
    settings["placement"] |= {"executor": "ray"}
    settings |= {"weight_sync": {"adapters": "adapter"}, "tensorboard": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    program = "from rlhf_launch.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(tmp_path / "run.yaml")],
        env=os.environ | {"RLHF_TRACEBACK": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "seconds/step" in row]
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    # New adapters change nothing: the first samples are the reference's own.
    assert rows[0]["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["reference_kl"] > 1e-4
    assert not any(name.startswith("idle_seconds/reference") for name in rows[0])
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows)
    # The model with its adapters merged, and the adapters alone.
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert (tmp_path / "run" / "model" / "adapter" / "adapter_model.safetensors").exists()
