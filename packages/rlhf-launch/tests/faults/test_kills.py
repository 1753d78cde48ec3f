"""Two ZeRO-3 ranks and two rollout engines on Ray, killed one after the other in one run: no bit is lost.

`nox -s faults` kills them in every phase.
"""

import io
import re

import pytest
import torch
from rich.console import Console
from rlhf_algos import read_metrics
from rlhf_launch.online.run import train
from rlhf_launch.placement.ray import RayCluster
from safetensors.torch import load_file

pytestmark = pytest.mark.stack


@pytest.fixture
def told(settings, make_config, tmp_path):
    """Runs the settings with changes, all of them on one Ray; returns the folder and what was said."""
    settings |= {"tensorboard": False, "checkpoint": {"every": 1}, "weight_sync": {"bucket_bytes": 65536}}
    settings["data"].pop("hold_out")
    settings["train"] |= {"engine": "faulty_plugins:DeepSpeed", "ranks": 2, "steps": 4}
    settings["rollout"] |= {"backend": "faulty_plugins:Transformers", "engines": 2, "samples_per_prompt": 2}
    settings["placement"] = {"executor": "ray", "device": "cpu", "timeout_s": 120}

    def run(name, **changes):
        console = Console(file=io.StringIO(), width=400)
        train(make_config(settings, output=str(tmp_path / name), **changes), console=console)
        return tmp_path / name, console.file.getvalue()

    cluster = RayCluster()
    yield run
    cluster.close()


def learnt(folder):
    rows = [(row["step"], row["reward"], row["grad_norm"]) for row in read_metrics(folder / "metrics.jsonl")]
    return rows, load_file(folder / "model" / "model.safetensors")


def test_ranks_and_engines_killed_one_after_the_other_cost_no_bit(told, fault, caplog):
    whole, _ = told("whole")
    flags = [
        fault("rollout", "generate", call=2),
        fault("policy-1", "step", call=2),
        fault("policy-1", "saved"),
    ]
    again, said = told("again", placement__restarts=2)
    assert all(flag.exists() for flag in flags)
    process = r"\(process \d+ on [\d.]+\) died during"
    named = re.findall(rf"(policy-1) {process} (?:\w+)[^\n]*\n(?:.*\n)?restart (\d) of 2", said)
    assert named == [("policy-1", str(number)) for number in (1, 2)]
    assert re.search(rf"rollout engine \d is lost \(rollout-\d {process} (generate|pulse)", caplog.text)
    assert not list((again / "checkpoints").glob(".unfinished-*"))
    (rows, weights), (expected, reference) = learnt(again), learnt(whole)
    assert rows == expected
    assert weights.keys() == reference.keys()
    assert all(torch.equal(weights[name], reference[name]) for name in weights)
