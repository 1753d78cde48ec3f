"""Filtering, refilling and carrying over, with a generator whose scores are known."""

import dataclasses
import types

import pytest
from rlhf_core import Failed, GenerationResult, RewardError, Sample, Score
from rlhf_launch.collecting import Group, collect
from rlhf_launch.config import (
    DataSection,
    ModelSection,
    RewardSection,
    RunConfig,
    TrainSection,
)
from rlhf_launch.prompts import Prompt, PromptStream
from rlhf_launch.rewarding import Rewarder
from rlhf_launch.rollout_config import DynamicSampling, RolloutSection
from rlhf_launch.run_state import group_from_plain, group_to_plain


class Pool:
    """Answers every request with `n` one-token samples and remembers it."""

    def __init__(self):
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        sample = Sample(token_ids=(9,), log_probs=(-0.5,), weight_versions=(0,), finish_reason="stop")
        return GenerationResult(request_id=request.request_id, samples=(sample,) * request.n)


class ByPrompt:
    """Prompts with an even id get unequal scores, the others equal ones; `bad` prompts have none."""

    def __init__(self, bad=()):
        self.bad = bad

    async def score(self, trajectories, texts):
        number = int(trajectories[0].metadata["number"])
        if number in self.bad:
            return [Failed(sample_id=t.sample_id, reason="no verdict") for t in trajectories]
        return [Score(value=float(i if number % 2 == 0 else 1)) for i in range(len(trajectories))]


@pytest.fixture
def make_run():
    def make(dynamic=None, *, reward=None, prompts=100, surplus=()):
        tokenizer = types.SimpleNamespace(batch_decode=lambda rows, **_: ["" for _ in rows])
        config = RunConfig(
            model=ModelSection(policy="m"),
            data=DataSection(prompts="p"),
            reward=RewardSection(function="m:f"),
            rollout=RolloutSection(samples_per_prompt=4, dynamic_sampling=dynamic),
            train=TrainSection(prompts_per_step=6),
        )
        numbered = [
            Prompt(prompt_id=str(n), text=str(n), token_ids=(5, n), metadata={"number": n}) for n in range(prompts)
        ]
        return types.SimpleNamespace(
            config=config,
            prompts=PromptStream(numbered, seed=0, shuffle=False),
            roles=types.SimpleNamespace(pool=Pool(), rewarder=Rewarder(reward or ByPrompt(), tokenizer)),
            state=types.SimpleNamespace(surplus=surplus),
        )

    return make


def numbers(groups):
    return [group.trajectories[0].metadata["number"] for group in groups]


def test_without_filtering_every_group_is_kept_in_order(make_run):
    run = make_run()
    collected = collect(run, 3)
    assert numbers(collected.groups) == [0, 1, 2, 3, 4, 5]
    assert [t.sample_id for t in collected.trajectories[:5]] == ["3/0/0", "3/0/1", "3/0/2", "3/0/3", "3/1/0"]
    assert len(run.roles.pool.requests) == 6  # one request for all samples of a prompt
    assert len({request.seed for request in run.roles.pool.requests}) == 6


def test_groups_that_teach_nothing_are_replaced(make_run):
    run = make_run(DynamicSampling(max_rounds=8))
    collected = collect(run, 0)
    assert numbers(collected.groups) == [0, 2, 4, 6, 8, 10]
    assert collected.surplus == []
    assert collected.counts == {
        "carried_over": 0,
        "prompts": run.prompts.position,
        "filtered": run.prompts.position - 6,
        "accepted": 6,
        "dropped_samples": 0,
    }
    assert len({t.sample_id for t in collected.trajectories}) == 24


def test_accepted_groups_beyond_the_step_open_the_next_one(make_run):
    run = make_run(DynamicSampling(max_rounds=8, oversample=4.0))
    first = collect(run, 0)
    assert numbers(first.groups) == [0, 2, 4, 6, 8, 10]
    assert numbers(first.surplus) == [12, 14, 16, 18, 20, 22]
    run.state.surplus = first.surplus
    second = collect(run, 1)
    assert numbers(second.groups) == [12, 14, 16, 18, 20, 22]
    assert run.prompts.position == 24  # nothing was sampled for it


def test_a_step_that_stays_short_trains_on_what_it_has(make_run):
    run = make_run(DynamicSampling(max_rounds=1))
    collected = collect(run, 0)
    assert numbers(collected.groups) == [0, 2, 4, 6, 8][: len(collected.groups)]
    assert 3 <= len(collected.groups) < 6


def test_samples_without_a_score_are_left_out_and_counted(make_run):
    run = make_run(reward=ByPrompt(bad={1, 4}))
    collected = collect(run, 0)
    assert numbers(collected.groups) == [0, 2, 3, 5]
    assert collected.counts["dropped_samples"] == 8
    with pytest.raises(RewardError, match="no sample of 6 prompts has a score"):
        collect(make_run(reward=ByPrompt(bad=range(6))), 0)


def test_a_carried_over_group_survives_a_checkpoint(make_run):
    group = collect(make_run(), 0).groups[0]
    import json

    restored = group_from_plain(json.loads(json.dumps(group_to_plain(group))))
    assert isinstance(restored, Group)
    assert dataclasses.asdict(restored) == dataclasses.asdict(group)
