"""Every role of a run on one GPU, in turns, against roles on GPUs of their own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_registry import gpu_check
from rlhf_core.testing.tiny import save_tiny_model

RUN_S = 1500
TOGETHER = {"colocate_with": "policy"}


def settings(folder: Path, output: str, placement: dict[str, Any]) -> dict[str, Any]:
    """PPO with four models in float32, whose numbers do not depend on where they run."""
    save_tiny_model(folder / "policy")
    save_tiny_model(folder / "reward", head="scalar", seed=1)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(24)))
    return {
        "model": {"path": str(folder / "policy"), "dtype": "float32"},
        "data": {"train": str(prompts), "hold_out": 2},
        "lengths": {"max_prompt_tokens": 16, "max_length": 64},
        "reward": {"model": str(folder / "reward")},
        "algorithm": {"name": "ppo", "kl_coef": 0.05},
        "rollout": {
            "backend": "vllm",
            "samples_per_prompt": 2,
            "sampling": {"max_tokens": 12},
            "max_num_seqs": 32,
            "options": {"gpu_memory_utilization": 0.4},
        },
        "train": {
            "prompts_per_step": 4,
            "minibatches": 2,
            "optimizer": {"learning_rate": 1e-4},
            "critic_optimizer": {"learning_rate": 1e-4},
            "steps": 2,
        },
        "placement": {"executor": "ray", "device": "cuda", "layout": "written", **placement},
        "output": str(folder / output),
    }


def trained(folder: Path, name: str, placement: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics of each step of a run in processes of its own."""
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(settings(folder, name, placement)))  # JSON is YAML
    command = [str(Path(sys.executable).with_name("rlhf")), "train", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    return rows


ALL_TOGETHER = {**dict.fromkeys(("critic", "reference", "rollout"), TOGETHER), "reward": {"model": TOGETHER}}
TWO_PLACES = {**dict.fromkeys(("critic", "reference"), TOGETHER), "reward": {"model": TOGETHER}}


@gpu_check(
    "hybrid: one GPU",
    "PPO with all roles on one GPU, in turns, over CUDA IPC",
    packages=["ray", "deepspeed", "vllm"],
)
def test_all_roles_on_one_gpu(tmp_path: Path, measure: Any) -> None:
    rows = trained(tmp_path, "together", ALL_TOGETHER)
    for row in rows:
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        assert all(map(math.isfinite, numbers.values())), numbers
    found = {name: value for name, value in rows[1].items() if name.startswith("seconds/")}
    for name, value in sorted(found.items()):
        measure("PPO step, all roles on one GPU, tiny", name, f"{value:.2f} s")


@gpu_check(
    "hybrid: against two GPUs",
    "the losses and scores of a run with the generator on a GPU of its own",
    gpus=2,
    packages=["ray", "deepspeed", "vllm"],
)
def test_one_gpu_against_two(tmp_path: Path) -> None:
    together = trained(tmp_path, "together", ALL_TOGETHER)
    apart = trained(tmp_path, "apart", TWO_PLACES)
    compared = [name for name in together[0] if name in ("loss", "reward", "grad_norm", "critic/loss", "kl")]
    assert compared
    for name in compared:
        assert together[0][name] == pytest.approx(apart[0][name], rel=0.02, abs=0.01), name
