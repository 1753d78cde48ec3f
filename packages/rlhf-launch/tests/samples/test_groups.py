"""Groups made of prompts, and put together as the batch of a step."""

import asyncio
import types
from dataclasses import replace

import pytest
import torch
from rlhf_core import CapabilityError, DeadlineExceeded, DroppedSample, SamplingConfig, Score, Trajectory
from rlhf_launch.samples.groups import GroupMaker, collate_groups, staleness
from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.samples.reward import Rewarder
from rlhf_launch.samples.sampling import greedy_sampling
from rlhf_launch.workers.waits import Waits
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


def test_parts_that_every_score_names_reach_the_batch():
    first = replace(group("a", 1.0), scores=(Score(value=1.0, components={"right": 1.0, "short": 0.5}),))
    second = replace(group("b", 0.0), scores=(Score(value=0.0, components={"right": 0.0}),))
    batch = collate_groups([first, second])
    assert batch["score/right"].tolist() == [1.0, 0.0]
    assert "score/short" not in batch


def test_rewards_of_single_turns_reach_the_batch():
    rewards = (0.0, 0.5, 0.0)
    batch = collate_groups([group("a", 1.0, versions=(0, 0), rewards=rewards), group("b", 0.0)])
    assert batch["rewards"].tolist() == [[0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_samples_with_images_cannot_be_trained_on():
    with pytest.raises(CapabilityError, match=r"sample 'a0' has 1 image\(s\) from its environment"):
        collate_groups([group("a", 1.0, images=(object(),))])


def test_staleness_counts_from_the_oldest_token():
    groups = [group("a", 1.0, versions=(2, 3)), group("b", 1.0, versions=(4,))]
    assert staleness(groups, 4) == {"staleness/mean": 1.0, "staleness/max": 2.0}
    assert staleness([ScoredGroup(trajectories=(), scores=())], 4) == {}


class Counting:
    """Scores a response by its number of tokens; the samples in `lost` have no score."""

    def __init__(self, lost=()):
        self.calls, self.lost = [], lost

    async def score(self, trajectories, texts):
        self.calls.append([t.sample_id for t in trajectories])
        return [
            DroppedSample(sample_id=t.sample_id, reason="hung")
            if t.sample_id in self.lost
            else Score(value=float(t.response_length))
            for t in trajectories
        ]


def drawing(*lengths):
    """Draws responses of these lengths."""

    async def sample(prompt, label, samples):
        assert samples == len(lengths)
        return [trajectory(f"{label}/{i}", versions=(0,) * length) for i, length in enumerate(lengths)]

    return sample


TOKENIZER = types.SimpleNamespace(batch_decode=lambda rows, **_: ["" for _ in rows])
PROMPT = Prompt(prompt_id="0", text="1", token_ids=(5,))


def maker(reward, *, lengths=(1, 2), greedy=(3,)):
    return GroupMaker(drawing(*lengths), Rewarder(reward, TOKENIZER), greedy=drawing(*greedy) if greedy else None)


def test_the_greedy_response_is_scored_apart_and_not_trained_on():
    reward = Counting()
    (group,) = maker(reward).groups([PROMPT], label="step", samples=2)
    assert group.greedy_score == 3
    assert [t.sample_id for t in group.trajectories] == ["step/0/0", "step/0/1"]
    assert sorted(reward.calls) == [["step/0/0", "step/0/1"], ["step/0/greedy/0"]]
    assert collate_groups([group])["greedy_scores"].tolist() == [3.0, 3.0]


def test_without_a_greedy_score_the_samples_of_a_prompt_cannot_be_used():
    (group,) = maker(Counting(lost={"a/0/greedy/0"})).groups([PROMPT], label="a", samples=2)
    assert group.trajectories == ()
    assert [lost.sample_id for lost in group.dropped] == ["a/0/0", "a/0/1"]
    assert group.dropped[0].reason == "the greedy response has no score: hung"


def test_groups_come_in_the_order_of_the_prompts_under_a_running_loop_too():
    async def cell():
        return maker(Counting(), greedy=None).groups([PROMPT] * 3, label="a", samples=2)

    groups = asyncio.run(cell())
    assert [group.trajectories[0].sample_id for group in groups] == ["a/0/0", "a/1/0", "a/2/0"]
    assert all(group.greedy_score is None for group in groups)


def test_a_wait_that_gets_too_long_says_how_many_prompts_are_missing():
    async def stuck(prompt, label, samples):
        await asyncio.sleep(60 if label == "a/1" else 0)
        return []

    slow = GroupMaker(stuck, Rewarder(Counting(), TOKENIZER))
    with pytest.raises(DeadlineExceeded, match="1 of 2 prompts are unfinished"):
        slow.groups([PROMPT] * 2, label="a", samples=1, waits=Waits(0.2))


def test_groups_in_scoring_are_bounded_over_all_prompts():
    inside, most = 0, 0

    class Slow(Counting):
        async def score(self, trajectories, texts):
            nonlocal inside, most
            inside, most = inside + 1, max(most, inside + 1)
            await asyncio.sleep(0.005)
            inside -= 1
            return await super().score(trajectories, texts)

    bounded = GroupMaker(drawing(1), Rewarder(Slow(), TOKENIZER), max_in_scoring=2)
    assert len(bounded.groups([PROMPT] * 9, label="a", samples=1)) == 9
    assert most == 2


def test_greedy_sampling_keeps_limits_and_stops():
    sampling = SamplingConfig(max_tokens=7, min_tokens=2, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(3,))
    assert greedy_sampling(sampling) == SamplingConfig(
        max_tokens=7, min_tokens=2, temperature=0.0, stop_token_ids=(3,)
    )
