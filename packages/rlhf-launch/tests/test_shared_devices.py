"""All roles of PPO in one place, in turns: the same numbers as with devices of their own, and less memory."""

import dataclasses
import json

import pytest
from rlhf_algos import CheckpointStore, from_mapping
from rlhf_launch.config.placement import OnlinePlacementSection
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.online.loop import run_steps
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.online.report import Reporter
from rlhf_launch.online.setup import open_run
from rlhf_launch.workers.devices import ROLLOUT

pytestmark = pytest.mark.stack

ROLES = {"policy", "critic", "reference", "reward model", ROLLOUT}


@pytest.fixture(scope="module")
def config(folder, tmp_path_factory):
    together = {"colocate_with": "policy"}
    settings = {
        "model": {"path": str(folder / "policy")},
        "data": {"train": str(folder / "prompts.jsonl"), "hold_out": 2},
        "lengths": {"max_prompt_tokens": 16, "max_length": 64},
        "reward": {"model": str(folder / "reward"), "function": "launch_rewards:share_of_alphanumerics"},
        "algorithm": {"name": "ppo", "kl_coef": 0.05},
        "rollout": {"samples_per_prompt": 2, "sampling": {"max_tokens": 12}, "max_num_seqs": 32},
        "train": {
            "prompts_per_step": 4,
            "minibatches": 2,
            "optimizer": {"learning_rate": 1e-3},
            "critic_optimizer": {"learning_rate": 1e-3},
            "steps": 2,
        },
        "placement": {
            "executor": "ray",
            "device": "cpu",
            **dict.fromkeys(("critic", "reference", "rollout"), together),
            "reward": {"model": together},
        },
        "output": str(tmp_path_factory.mktemp("together")),
        "checkpoint": {"every": 1},
    }
    return from_mapping(OnlineConfig, settings, source="test")


class Turns:
    """Who left and who came on the devices of a run, in order, and who was there in each turn."""

    def __init__(self, devices):
        self.changes, self.there, self.devices = [], [], devices
        for name, tenant in devices._tenants.items():
            devices._tenants[name] = dataclasses.replace(
                tenant, leave=self.noting(f"-{name}", tenant.leave), come=self.noting(f"+{name}", tenant.come)
            )
        begin = devices._make_way

        def make_way(names):
            begin(names)
            if not self.there or self.there[-1] != devices.present:
                self.there.append(devices.present)

        devices._make_way = make_way

    def noting(self, change, call):
        def noted():
            self.changes.append(change)
            call()

        return noted


def rows_of(config):
    """The metrics of each step but those of time, memory and rounding."""
    varying = ("seconds/", "idle_seconds/", "tokens_per_second/", "mismatch", "memory/", "sync/probe_seconds")
    rows = map(json.loads, (config.output / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if not name.startswith(varying)} for row in rows]


def trained(config, watch=lambda run: None):
    inputs, store = check_inputs(config), CheckpointStore(config.output / "checkpoints")
    with (
        Reporter(config.output, steps=config.train.steps, tensorboard=False) as reporter,
        open_run(config, inputs, store, reporter) as run,
    ):
        watched = watch(run)
        run_steps(run)
        return watched


def test_ppo_with_all_roles_in_one_place(config, tmp_path):
    turns = trained(config, lambda run: Turns(run.pool.devices))
    assert turns.devices.shared == (frozenset(ROLES),)
    samplers = {ROLLOUT, "reward model"}
    # What is there at the same time: the engines with the models that score for them, then each role by itself, and
    # both ends of a sync.
    assert set(turns.there) == {
        *map(frozenset, (samplers, {"policy"}, {"critic"}, {"reference"}, {"policy", ROLLOUT}))
    }
    one_step = turns.there[turns.there.index(frozenset(samplers)) :][:7]
    assert [set(there) for there in one_step] == [
        samplers,
        {"policy"},
        {"reference"},
        {"critic"},
        {"policy"},
        {"policy", ROLLOUT},
        {"policy"},
    ]

    placement = OnlinePlacementSection(executor="ray", device="cpu")
    apart = dataclasses.replace(config, placement=placement, output=tmp_path)
    trained(apart)
    assert rows_of(config) == rows_of(apart)
