"""Episodes of several rows: one row for the algorithm, several for the model."""

import pytest
import torch
from rlhf_algos import EPISODE_SHARE, aggregate, make_recipe
from rlhf_core import RaggedBatch, RaggedColumn, Score, Trajectory
from rlhf_launch.samples.groups import rows_of_groups
from rlhf_launch.workers.prepare import prepare_rows
from rlhf_rollout import ScoredGroup


def row(name, sampled, *, episode="", rewards=()):
    return Trajectory(
        sample_id=name,
        group_id="0",
        episode_id=episode,
        token_ids=(5,) * (1 + sampled),
        response_mask=(False,) + (True,) * sampled,
        rollout_log_probs=(0.0,) + (-0.5,) * sampled,
        weight_versions=(-1,) + (0,) * sampled,
        rewards=rewards,
    )


def batch_of(*rows):
    """Of pairs of a trajectory and its score, all of one prompt."""
    group = ScoredGroup(
        trajectories=tuple(one for one, _ in rows), scores=tuple(Score(value=value) for _, value in rows)
    )
    return rows_of_groups([group])


def prepared(batch, recipe):
    columns = {
        name: column if isinstance(column, RaggedColumn) else torch.from_numpy(column)
        for name, column in prepare_rows(batch, recipe, 0.0).columns.items()
    }
    return batch.with_columns(**columns)


BRANCHED = (
    (row("0/0/0", 1, episode="0/0"), 1.0),
    (row("0/0/1", 3, episode="0/0"), 1.0),
    (row("0/1", 2), 0.0),
    (row("0/2", 2), 0.0),
)


def test_a_baseline_counts_an_episode_once():
    batch = prepared(batch_of(*BRANCHED), make_recipe("grpo", {"advantage_options": {"scale": "none"}}))
    advantages = batch["advantages"]
    # The mean of the three episodes is 1/3; of the four rows it would be 1/2.
    assert advantages[:, 1].tolist() == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])
    assert advantages[1].tolist() == pytest.approx([0, 2 / 3, 2 / 3, 2 / 3])
    assert batch[EPISODE_SHARE].tolist() == [0.25, 0.75, 1.0, 1.0]
    assert batch["prompt_tokens"].tolist() == [8, 8, 8, 8]


@pytest.mark.parametrize(
    "how", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "max_length", "prompt_mean"]
)
@pytest.mark.parametrize("count_empty_rows", [True, False])
def test_the_weight_of_an_episode_does_not_grow_with_its_rows(how, count_empty_rows):
    recipe = make_recipe("grpo")
    apart = prepared(batch_of(*BRANCHED), recipe)
    whole = prepared(batch_of((row("0/0", 4), 1.0), *BRANCHED[2:]), recipe)

    def loss(batch, values):
        padded = batch.padded()
        total, weight = aggregate(
            values,
            padded.response_mask,
            how,
            max_length=10,
            count_empty_rows=count_empty_rows,
            prompt_tokens=batch["prompt_tokens"],
            episode_share=batch.per_row.get(EPISODE_SHARE),
        )
        return float(total / weight)

    rows = torch.tensor([[0.0, 9, 0, 0], [0, 1, 2, 4], [0, 3, 5, 0], [0, 1, 1, 0]])
    joined = torch.tensor([[0.0, 9, 1, 2, 4], [0, 3, 5, 0, 0], [0, 1, 1, 0, 0]])
    assert loss(apart, rows) == pytest.approx(loss(whole, joined))
    if how == "seq_mean_token_mean":
        assert loss(apart, rows) == pytest.approx(((9 + 1 + 2 + 4) / 4 + 4 + 1) / 3)


def test_a_step_is_judged_by_what_came_of_it_in_later_branches_too():
    """Two episodes of two steps; in the first the steps are in two rows."""
    apart = batch_of(
        (row("0/0/0", 1, episode="0/0", rewards=(0, 1.0)), 3.0),
        (row("0/0/1", 1, episode="0/0", rewards=(0, 2.0)), 3.0),
        (row("0/1", 2, rewards=(0, 0.5, 0.5)), 1.0),
    )
    recipe = make_recipe("grpo", {"advantage_options": {"scale": "none"}})
    advantages = prepared(apart, recipe)["advantages"]
    # Step 0: returns 3 and 1, mean 2. Step 1: returns 2 and 0.5, mean 1.25.
    assert advantages[0].tolist() == pytest.approx([0, 1, 0])
    assert advantages[1].tolist() == pytest.approx([0, 0.75, 0])
    assert advantages[2].tolist() == pytest.approx([0, -1, -0.75])


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "opo", "reinforce_pp"])
def test_the_advantages_are_those_of_the_joined_episode(name):
    recipe = make_recipe(name)
    apart = prepared(batch_of(*BRANCHED), recipe)["advantages"]
    whole = prepared(batch_of((row("0/0", 4), 1.0), *BRANCHED[2:]), recipe)["advantages"]
    both = torch.cat([apart[0, 1:2], apart[1, 1:4]])
    assert both.tolist() == pytest.approx(whole[0, 1:].tolist())
    assert apart[2].tolist() == pytest.approx(whole[1, :4].tolist())


def test_without_branches_nothing_is_joined():
    batch = batch_of(*BRANCHED[2:])
    assert "episode_ids" not in batch
    assert EPISODE_SHARE not in prepared(batch, make_recipe("grpo"))
    assert isinstance(batch, RaggedBatch)
