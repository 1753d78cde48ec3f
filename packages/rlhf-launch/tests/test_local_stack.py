"""DeepSpeed and vLLM in one process, without Ray: the command, as a user starts it, with overlap."""

import json
import os
import subprocess
import sys

import pytest
import yaml

pytestmark = pytest.mark.stack


def test_deepspeed_and_vllm_share_a_process(settings, folder, tmp_path):
    settings["reward"]["model"] = str(folder / "reward")  # scores while the policy is trained
    settings["rollout"] |= {"backend": "vllm", "overlap": {"max_staleness": 1}}
    settings["train"] |= {"engine": "deepspeed"}
    settings["train"] = {**settings["train"], "steps": 4}
    settings |= {"checkpoint": {"every": 2, "in_background": True}, "tensorboard": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    program = "from rlhf_launch.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(tmp_path / "run.yaml")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RLHF_TRACEBACK": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward" in row]
    assert [row["weight_version"] for row in rows] == [1, 2, 3, 4]
    assert all(row["staleness/max"] <= 1 and row["grad_norm"] > 0 for row in rows)
    # On the first step's weights the sampler agrees with the trainer; later samples may be a version behind.
    assert rows[0]["mismatch/log_prob_max"] < 1e-4
    assert (tmp_path / "run" / "checkpoints" / "step-000004" / "state.json").exists()
