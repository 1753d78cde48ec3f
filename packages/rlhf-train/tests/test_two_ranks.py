"""Two processes are started once and run every check of two_ranks.py; the tests look at what they measured."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rlhf_core.testing.tiny import save_tiny_model
from torch.distributed import TCPStore

pytestmark = pytest.mark.stack

STAGES = ("0", "1", "2", "3")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("two-ranks")
    save_tiny_model(work / "tied", tied=True)
    save_tiny_model(work / "untied", tied=False)
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


@pytest.mark.parametrize("case", ["0-12", "1-12", "2-12", "3-12", "3-4096"])
@pytest.mark.parametrize("model", ["policy-tied", "policy-untied", "critic-untied"])
def test_training_equals_plain_torch(measured, model, case):
    """`case` is the ZeRO stage and the tokens per micro-batch."""
    found = measured["equality"][f"{model}-{case}"]
    assert found["gap"] < 1e-6
    assert found["moved"] > 1e-3
    assert found["norm_gap"] < 1e-5
    assert found["names"]
    assert found["packing"]
    assert found["tokens"] == 900 + 850 + 40 + 9 + 12


def test_gradient_checkpointing_changes_nothing(measured):
    assert measured["gradient_checkpointing"]["gap"] < 1e-6


@pytest.mark.parametrize("stage", ["2", "3"])
def test_host_offload_changes_nothing(measured, stage):
    assert measured["offloaded_to_the_host"][stage] < 1e-6


def test_frozen_engines_beside_a_policy_keep_their_scores(measured):
    assert max(measured["scores"]["gaps"]) < 1e-5
    assert measured["scores"]["moved"] > 1e-3


@pytest.mark.parametrize("fault", ["loss", "gradient"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_on_one_rank_skips_the_step_on_all(measured, stage, fault):
    found = measured["one_rank_is_not_finite"][f"{fault}-{stage}"]
    assert found["skipped"]
    assert found["unchanged"] == 0
    assert "row-2" in found["ids"]
    assert found["good"]
    assert found["trace"] < 1e-6
    if fault == "loss":
        assert len(found["ids"]) <= 2, "only the rows of the micro-batch"


@pytest.mark.parametrize("stage", ["1", "3"])
def test_weights_arrive_over_gloo(measured, stage):
    assert measured["weights_over_gloo"][stage]["gap"] == 0
    assert measured["weights_over_gloo"][stage]["buckets"] > 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_continues_bit_for_bit(measured, stage):
    assert measured["resume"][stage] == {"reports": True, "gap": 0}


@pytest.mark.parametrize("stage", ["2", "3"])
def test_an_export_in_several_files_loads_with_transformers(measured, stage):
    assert measured["export"][stage]["gap"] < 1e-5
    assert measured["export"][stage]["files"] > 1


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_bfloat16_trains_and_skips(measured, stage):
    found = measured["bfloat16"][stage]
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["dtypes"] == ["bfloat16"]
    assert found["skipped"]
    assert found["unchanged"] == 0


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_adapters_train_merge_and_resume(measured, stage, role):
    found = measured["adapters"][f"{role}-{stage}"]
    assert found["names"]
    assert found["moved"] > 1e-4
    assert found["frozen"] == 0
    assert found["gap"] < 1e-6
    assert found["resumed"] == 0
    assert found["exported"] < 1e-5
