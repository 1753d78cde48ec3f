"""score_as_finished: scoring goes on beside generation, nothing is lost, errors end everything."""

import asyncio

import pytest
from reward_ground import trajectory
from rlhf_core import DroppedSample, RewardError, Score, Trajectory
from rlhf_rollout import (
    CombinedReward,
    EnvironmentReward,
    PythonReward,
    ScoredGroup,
    score_as_finished,
    score_group,
)


def decode(trajectories):
    return [t.sample_id for t in trajectories]


class Lengths:
    async def score(self, trajectories, texts):
        return [Score(value=float(len(t.token_ids))) for t in trajectories]


async def collect(groups, reward, **options):
    return [found async for found in score_as_finished(groups, reward, decode, **options)]


async def group(index, *, after=None):
    if after is not None:
        await after.wait()
    return [trajectory(f"{index}a"), trajectory(f"{index}b", response=2)]


def test_a_group_is_scored_while_another_is_generated():
    async def run():
        scored = asyncio.Event()

        class Telling(Lengths):
            async def score(self, trajectories, texts):
                scored.set()
                return await super().score(trajectories, texts)

        # The first group is finished only after the second has been scored: without overlap this never ends.
        return await asyncio.wait_for(collect([group(0, after=scored), group(1)], Telling()), 20)

    found = asyncio.run(run())
    assert [index for index, _ in found] == [1, 0]
    assert [[t.sample_id for t in g.trajectories] for _, g in found] == [["s1a", "s1b"], ["s0a", "s0b"]]
    assert [[s.value for s in g.scores] for _, g in found] == [[2.0, 3.0]] * 2


def test_a_reward_that_blocks_its_thread_does_not_hold_generation():
    import threading

    generated = threading.Event()

    async def late():
        await asyncio.sleep(0.05)
        generated.set()
        return [trajectory("late")]

    # The reward of the first group waits for the second one's generation.
    reward = PythonReward(lambda completion: float(generated.wait(20)))
    assert [g.scores[0].value for _, g in asyncio.run(collect([group(0), late()], reward))] == [1.0, 1.0]


def test_batches_in_scoring_are_bounded():
    inside, most = 0, 0

    class Counting(Lengths):
        async def score(self, trajectories, texts):
            nonlocal inside, most
            inside, most = inside + 1, max(most, inside + 1)
            await asyncio.sleep(0.005)
            inside -= 1
            return await super().score(trajectories, texts)

    assert len(asyncio.run(collect([group(i) for i in range(9)], Counting(), max_batches=2))) == 9
    assert most == 2


def test_dropped_samples_are_reported_not_lost():
    class Dropping(Lengths):
        async def score(self, trajectories, texts):
            first, *others = trajectories
            scored = await super().score(others, texts[1:])
            return [DroppedSample(sample_id=first.sample_id, reason="hung"), *scored]

    async def half():
        return [DroppedSample(sample_id="env", reason="raised"), *await group(0)]

    ((_, found),) = asyncio.run(collect([half()], Dropping()))
    assert [t.sample_id for t in found.trajectories] == ["s0b"]
    assert [s.value for s in found.scores] == [3.0]
    assert [f.sample_id for f in found.dropped] == ["env", "s0a"]


def test_a_group_without_a_trajectory_is_not_scored():
    class Untouched:
        async def score(self, trajectories, texts):
            raise AssertionError("there is nothing to score")

    lost = DroppedSample(sample_id="env", reason="raised")
    found = asyncio.run(score_group([lost], Untouched(), decode))
    assert found == ScoredGroup(trajectories=(), scores=(), dropped=(lost,))


def test_the_places_of_a_score_s_parts_travel_with_the_tokens():
    class Steps(Lengths):
        async def score(self, trajectories, texts):
            return [Score(value=0.5, rewards=(0.0, 0.5)), Score(value=1.0)]

    found = asyncio.run(score_group([trajectory("a"), trajectory("b")], Steps(), decode))
    assert [t.rewards for t in found.trajectories] == [(0.0, 0.5), ()]


def scored(*values, greedy=None):
    group = [trajectory(str(index)) for index in range(len(values))]
    scores = tuple(Score(value=value) for value in values)
    return ScoredGroup(trajectories=tuple(group), scores=scores, greedy_score=greedy)


def test_scores_differ_from_each_other_or_from_the_greedy_one():
    assert not scored().scores_differ
    assert not scored(1.0, 1.0).scores_differ
    assert scored(1.0, 0.0).scores_differ
    assert not scored(1.0, greedy=1.0).scores_differ
    assert scored(1.0, greedy=0.0).scores_differ


def test_a_group_has_a_score_for_each_trajectory():
    with pytest.raises(ValueError, match="1 trajectories has 0 scores"):
        ScoredGroup(trajectories=(trajectory("a"),), scores=())


def test_an_error_ends_generation_and_is_raised():
    ended = []

    async def endless():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(True)
            raise
        return []

    class Short:
        async def score(self, trajectories, texts):
            return []

    with pytest.raises(RewardError, match="Short returned 0 scores for 2"):
        asyncio.run(collect([group(0), endless()], Short()))
    assert ended == [True]


def branch(name, episode, *, rewards=(), **metadata):
    return Trajectory(
        sample_id=name,
        group_id="g",
        episode_id=episode,
        token_ids=(5, 6, 7),
        response_mask=(False, True, True),
        rollout_log_probs=(0.0, -0.5, -0.5),
        weight_versions=(-1, 0, 0),
        rewards=rewards,
        metadata=metadata,
    )


def test_the_last_trajectory_of_an_episode_is_scored_and_the_others_have_its_score():
    asked = []

    class Last:
        async def score(self, trajectories, texts):
            asked.extend(texts)
            return [Score(value=float(index)) for index, _ in enumerate(trajectories)]

    samples = [branch("a/0", "a"), branch("b", ""), branch("a/1", "a"), branch("c", "")]
    group = asyncio.run(score_group(samples, Last(), decode))
    assert asked == ["a/1", "b", "c"]
    assert [t.sample_id for t in group.trajectories] == ["a/0", "a/1", "b", "c"]
    assert [s.value for s in group.scores] == [0, 0, 1, 2]
    assert [list(rows) for rows in group.episodes] == [[0, 1], [2], [3]]
    assert [s.value for s in group.episode_scores] == [0, 1, 2]


def test_an_episode_is_dropped_as_a_whole():
    class Dropping:
        async def score(self, trajectories, texts):
            return [DroppedSample(sample_id=t.sample_id, reason="bad") for t in trajectories]

    group = asyncio.run(score_group([branch("a/0", "a"), branch("a/1", "a")], Dropping(), decode))
    assert group.trajectories == ()
    assert [sample.sample_id for sample in group.dropped] == ["a/1"]


def test_what_was_earned_in_earlier_branches_keeps_its_place_and_the_weight_of_its_part():
    samples = [branch("a/0", "a", rewards=(0, 0, 2.0)), branch("a/1", "a", rewards=(0, 1.0, 0), earned=3.5)]
    reward = CombinedReward({"environment": EnvironmentReward(), "length": Lengths()}, {"environment": 0.5})
    group = asyncio.run(score_group(samples, reward, decode))
    assert [s.value for s in group.scores] == [0.5 * 3.5 + 3] * 2
    assert [list(t.rewards) for t in group.trajectories] == [[0, 0, 1.0], [0, 0.5, 0]]


def test_an_episode_has_one_score_and_stands_together():
    one, other = Score(value=1.0), Score(value=0.0)
    with pytest.raises(ValueError, match="episode 'a' have several scores"):
        ScoredGroup(trajectories=(branch("a/0", "a"), branch("a/1", "a")), scores=(one, other))
    with pytest.raises(ValueError, match="must stand together"):
        ScoredGroup(trajectories=(branch("a/0", "a"), branch("b", ""), branch("a/1", "a")), scores=(one,) * 3)
