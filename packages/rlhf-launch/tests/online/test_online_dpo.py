"""Online DPO in this process: torch engine, Transformers backend."""

import io
import json

import pytest
from rich.console import Console
from rlhf_core import ConfigError
from rlhf_launch.bundles.bundle import read_bundle
from rlhf_launch.online.run import train
from rlhf_launch.online.trainer import UpdatePlan
from rlhf_launch.replay.rerun import replay_step


@pytest.fixture
def paired(settings):
    settings["algorithm"] = {"name": "online_dpo", "beta": 0.1}
    del settings["data"]["hold_out"]
    return settings


def rows_of(run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.stack
def test_the_reward_rises_over_several_updates_per_batch(paired, make_config):
    learning = {"steps": 14, "prompts_per_step": 8, "minibatches": 2, "epochs_per_step": 2}
    learning["optimizer"] = {"learning_rate": 1e-3}
    run = train(make_config(paired, train={**paired["train"], **learning}, bundles={"every": 14}))
    rows = rows_of(run)
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-3:]) - sum(rewards[:3]) > 0.3
    assert all(row["pairs"] + row["ties"] == 8 for row in rows)
    assert all(row["scoring_pass"] == 0 for row in rows)  # the loss needs no log-probs of before
    assert rows[0]["margin"] > 0
    assert rows[-1]["accuracy"] > 0.5
    bundle = run.folder / "bundles" / "step-000014"
    batch, order = read_bundle(bundle).batch(), read_bundle(bundle).order
    scores, groups = batch["scores"], batch["group_ids"]
    assert len(order) == 4
    assert sorted(order[0] + order[1]) == sorted(order[2] + order[3])
    for portion in order:
        for chosen, rejected in zip(portion[::2], portion[1::2], strict=True):
            same = groups == groups[chosen]
            assert groups[rejected] == groups[chosen]
            assert scores[chosen] == scores[same].max() > scores[same].min() == scores[rejected]
    assert sum(map(len, order[:2])) == 2 * rows[-1]["pairs"]


@pytest.mark.stack
def test_a_step_of_ties_alone_changes_no_weight_and_the_run_goes_on(paired, make_config):
    config = make_config(
        paired,
        reward={"function": "launch_rewards:nothing"},
        bundles={"every": 1},
        checkpoint={"every": 1, "keep": 9},
    )
    run = train(config)
    rows = rows_of(run)
    assert [(row["pairs"], row["ties"]) for row in rows] == [(0, 4)] * 3
    assert all("grad_norm" not in row for row in rows)
    again = replay_step(run.folder / "bundles" / "step-000002", console=Console(file=io.StringIO()))
    assert again.first is None  # the log-probs of now are compared with the sampler's, whose last bits differ
    assert again.error is None


def test_pairs_are_cut_into_minibatches_whole():
    plan = UpdatePlan(minibatches=3, epochs=2)
    assert plan.order([], 0, ranks=1) == []
    drawn = plan.order([0, 1, 2, 3, 4], 0, ranks=1)  # of pairs, each of a group of its own
    for epoch in (drawn[:3], drawn[3:]):
        assert sorted(pair for portion in epoch for pair in portion) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__samples_per_prompt": 1}, "samples_per_prompt must be at least 2, got 1"),
        (
            {"train__minibatches": 8},
            "one pair of each prompt, and 4 pairs a step .* cannot be cut into 8 minibatches",
        ),
        ({"train__routing_replay": True}, "train.routing_replay takes the experts from scoring"),
    ],
)
def test_what_does_not_go_together_is_refused(paired, make_config, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(paired, **changes)


def test_samples_of_a_processed_distribution_are_welcome(paired, make_config):
    """No ratio starts from the sampler's log-probs, so that top-p does no harm."""
    assert make_config(paired, rollout__sampling={"top_p": 0.9}).learns_from_pairs
