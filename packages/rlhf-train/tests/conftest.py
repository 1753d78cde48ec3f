"""Two processes are started once and run every check of two_ranks.py; tests look at what they measured."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rlhf_core.testing.tiny import save_tiny_experts, save_tiny_model
from rlhf_core.testing.vision import save_tiny_vision_model
from torch.distributed import TCPStore

RESIZED_STAGES = (1, 2, 3)
# Modules beside the tests, which processes import by name too.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def two_ranks_work(tmp_path_factory) -> Path:
    """Models, and checkpoints of one rank."""
    from mixture_models import KINDS, save_mixture
    from two_rank_features import save_on_one_rank

    work = tmp_path_factory.mktemp("two-ranks")
    save_tiny_model(work / "tied", tied=True)
    save_tiny_model(work / "untied", tied=False)
    save_tiny_experts(work / "experts", "qwen3_moe")
    save_tiny_vision_model(work / "seeing", "qwen2_5_vl")
    save_tiny_model(work / "scalar", head="scalar", tied=False)
    for kind in KINDS:
        save_mixture(kind, work / kind)
    for stage in RESIZED_STAGES:
        save_on_one_rank(work, stage)
    return work


@pytest.fixture(scope="session")
def measured(two_ranks_work) -> dict[str, Any]:
    """What the checks of two_ranks.py found in two processes, started once."""
    work = two_ranks_work
    # The store listens on a port of its own choice; the ranks join it as torchrun's do.
    store = TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=300), wait_for_workers=False)
    logs = [work / f"rank-{rank}.log" for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(work)]
        with log.open("w") as stream:
            processes.append(
                subprocess.Popen(command, env={**os.environ, **environment}, stdout=stream, stderr=stream)
            )
    try:
        codes = [process.wait(timeout=800) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        failed = sorted(work.glob("failed-*.txt"), key=lambda file: file.stat().st_mtime)
        first = failed[0].read_text() if failed else logs[0].read_text()[-4000:]
        pytest.fail(f"exit codes {codes}; first failure: {first}", pytrace=False)
    return json.loads((work / "results.json").read_text())
