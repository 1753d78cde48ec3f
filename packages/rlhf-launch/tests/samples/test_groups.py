"""Groups put together as the batch of a step."""

import pytest
import torch
from rlhf_core import CapabilityError, Score, Trajectory
from rlhf_launch.samples.groups import collate_groups, staleness
from rlhf_rollout import ScoredGroup


def trajectory(name, *, versions=(0,), **fields):
    length = len(versions)
    return Trajectory(
        sample_id=name,
        group_id=name[0],
        token_ids=(5, *range(6, 6 + length)),
        response_mask=(False,) + (True,) * length,
        rollout_log_probs=(0.0,) + (-0.5,) * length,
        weight_versions=(-1, *versions),
        **fields,
    )


def group(name, *values, greedy=None, **fields):
    return ScoredGroup(
        trajectories=tuple(trajectory(f"{name}{index}", **fields) for index in range(len(values))),
        scores=tuple(Score(value=value) for value in values),
        greedy_score=greedy,
    )


def test_rows_of_one_prompt_share_a_number_and_keep_their_scores():
    empty = ScoredGroup(trajectories=(), scores=())
    batch = collate_groups([group("a", 1.0, 0.0), empty, group("b", 0.5, truncated=True)])
    assert batch.sample_ids == ("a0", "a1", "b0")
    first, second, third = batch["group_ids"].tolist()
    assert first == second != third
    assert batch["scores"].tolist() == [1.0, 0.0, 0.5]
    assert batch["scores"].dtype == torch.float32
    assert batch["truncated"].tolist() == [False, False, True]
    assert "greedy_scores" not in batch
    assert batch.select([2]).columns["scores"].tolist() == [0.5]


def test_every_row_has_the_greedy_score_of_its_prompt():
    batch = collate_groups([group("a", 1.0, 0.0, greedy=0.25), group("b", 0.5, greedy=0.0)])
    assert batch["greedy_scores"].tolist() == [0.25, 0.25, 0.0]


def test_rewards_of_single_turns_reach_the_batch():
    rewards = (0.0, 0.5, 0.0)
    batch = collate_groups([group("a", 1.0, versions=(0, 0), rewards=rewards), group("b", 0.0)])
    assert batch["rewards"].tolist() == [[0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_samples_with_images_cannot_be_trained_on():
    with pytest.raises(CapabilityError, match=r"sample 'a0' has 1 image\(s\).*read token ids only"):
        collate_groups([group("a", 1.0, images=(object(),))])


def test_staleness_counts_from_the_oldest_token():
    groups = [group("a", 1.0, versions=(2, 3)), group("b", 1.0, versions=(4,))]
    assert staleness(groups, 4) == {"staleness/mean": 1.0, "staleness/max": 2.0}
    assert staleness([ScoredGroup(trajectories=(), scores=())], 4) == {}
