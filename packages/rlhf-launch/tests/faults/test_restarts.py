"""A run that loses its training engine begins again within the same command, and ends with the same weights."""

import io
import json

import pytest
import torch
from rich.console import Console
from rlhf_algos import OfflineConfig, from_mapping, read_metrics
from rlhf_core import EngineDiedError
from rlhf_launch.offline.run import train_offline
from rlhf_launch.online.run import train
from safetensors.torch import load_file

pytestmark = pytest.mark.stack

VARYING = ("seconds/", "idle_seconds/", "tokens_per_second/", "mismatch", "sync/probe_seconds", "memory/")


def rows(folder):
    return [
        {name: value for name, value in row.items() if not name.startswith(VARYING)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def same_weights(folder, other):
    mine, theirs = (load_file(path / "model" / "model.safetensors") for path in (folder, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture
def told(settings, make_config, tmp_path):
    """Runs the settings with changes; returns the folder and what was said."""
    settings |= {"tensorboard": False}
    settings["train"] = {**settings["train"], "engine": "faulty_plugins:Torch", "steps": 4}

    def run(name, **changes):
        console = Console(file=io.StringIO(), width=200)
        config = make_config(settings, output=str(tmp_path / name), **changes)
        train(config, console=console)
        return tmp_path / name, console.file.getvalue()

    return run


@pytest.mark.parametrize(("every", "where"), [(2, "after step 2"), (0, "from its start")])
def test_a_lost_engine_costs_no_bit(told, fault, every, where):
    whole, _ = told("whole", checkpoint__every=every, checkpoint__minutes=0)
    flag = fault("policy-0", "step", call=4, act="raise")
    again, said = told("again", checkpoint__every=every, checkpoint__minutes=0, placement__restarts=1)
    assert flag.exists()
    assert f"policy-0 died in step\nrestart 1 of 1: the run begins again {where}" in said
    assert rows(again) == rows(whole)
    assert same_weights(again, whole)


def test_without_restarts_the_loss_ends_the_run_with_the_way_to_go_on(told, fault):
    fault("policy-0", "step", call=4, act="raise")
    with pytest.raises(EngineDiedError, match="policy-0 died in step") as caught:
        told("lost", checkpoint__every=2)
    assert "the newest checkpoint is that of step 2 of 4" in caught.value.__notes__[-1]


def test_offline_too(folder, fault, tmp_path):
    data = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{i}: say ", "chosen": "yes" * (1 + i % 3), "rejected": "no"} for i in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in pairs))

    def run(name, restarts=0):
        settings = {
            "model": str(folder / "policy"),
            "data": {"train": str(data)},
            "output": str(tmp_path / name),
            "reference_cache": str(tmp_path / "references"),
            "train": {"batch_size": 4, "engine": "faulty_plugins:Torch", "optimizer": {"learning_rate": 1e-3}},
            "checkpoint": {"every": 2},
            "placement": {"executor": "local", "restarts": restarts},
            "tensorboard": False,
        }
        said = []
        train_offline(from_mapping(OfflineConfig, settings, source="test"), say=said.append)
        return tmp_path / name, said

    whole, _ = run("whole")
    fault("policy-0", "step", call=3, act="raise")
    again, said = run("again", restarts=1)
    assert said == ["policy-0 died in step\nrestart 1 of 1: the run begins again after step 2"]
    assert rows(again) == rows(whole)
    assert same_weights(again, whole)
