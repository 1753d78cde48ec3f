"""Trajectories and scores: what is refused, and the lengths."""

import math

import pytest
from rlhf_core import DroppedSample, Observation, RewardError, Score, Trajectory, check_scores, keep_scored


def trajectory(**changes) -> Trajectory:
    fields = {
        "sample_id": "p/0",
        "group_id": "p",
        "token_ids": (5, 6, 7, 8, 9),
        "response_mask": (False, True, False, True, True),
        "rollout_log_probs": (0.0, -0.5, 0.0, -0.25, -0.1),
        "weight_versions": (-1, 3, -1, 4, 4),
    }
    return Trajectory(**{**fields, **changes})


def test_several_turns_are_one_row():
    t = trajectory()
    assert (t.prompt_length, t.response_length) == (1, 3)
    assert t.response_token_ids == (6, 7, 8, 9)


def test_nothing_sampled():
    t = trajectory(response_mask=(False,) * 5)
    assert (t.prompt_length, t.response_length, t.response_token_ids) == (5, 0, ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": (5, 6)}, "differ in length"),
        ({"rollout_log_probs": (0.0,) * 4}, "differ in length"),
        ({"response_mask": (True,) * 5}, "at least one prompt token"),
        (
            {"token_ids": (), "response_mask": (), "rollout_log_probs": (), "weight_versions": ()},
            "at least one prompt token",
        ),
        ({"rollout_log_probs": (0.0, math.nan, 0.0, -0.25, -0.1)}, "position 1"),
        ({"rollout_log_probs": (0.0, -math.inf, 0.0, -0.25, -0.1)}, "position 1"),
        ({"rollout_log_probs": (0.0, -0.5, 0.0, 0.25, -0.1)}, "position 3"),
        ({"weight_versions": (-1, 3, -1, -1, 4)}, "position 3"),
    ],
)
def test_refusals_name_the_sample(changes, message):
    with pytest.raises(ValueError, match=f"'p/0'.*{message}"):
        trajectory(**changes)


def test_scores_must_be_as_many_as_trajectories_and_finite():
    check_scores([Score(value=1.0)], [trajectory()], source="f")
    with pytest.raises(RewardError, match="reward f returned 0 scores for 1"):
        check_scores([], [trajectory()], source="f")
    for bad in (math.nan, math.inf):
        with pytest.raises(RewardError, match="'p/0'"):
            check_scores([Score(value=bad)], [trajectory()], source="f")


# ------------------------------------------------------------ rewards of environments, failures


def test_rewards_of_turns_are_aligned_with_the_tokens():
    assert trajectory(rewards=(0.0, -0.5, 0.0, 0.0, 1.0)).rewards[4] == 1.0


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ((0.0, 1.0), "differ in length"),
        ((0.0, math.nan, 0.0, 0.0, 0.0), "position 1 is nan"),
        ((0.0, 0.0, 1.0, 0.0, 0.0), "position 2 is 1.0"),
    ],
)
def test_rewards_belong_to_sampled_tokens(rewards, message):
    with pytest.raises(ValueError, match=f"'p/0'.*{message}"):
        trajectory(rewards=rewards)


def test_components_must_be_finite_too():
    with pytest.raises(RewardError, match="component 'tidy' for sample 'p/0'") as raised:
        check_scores([Score(value=1.0, components={"tidy": math.inf})], [trajectory()], source="f")
    assert raised.value.sample_ids == ("p/0",)


def test_token_rewards_are_aligned_with_the_trajectory():
    check_scores([Score(value=1.0, rewards=(0.0, 0.5, 0.0, 0.0, 0.5))], [trajectory()], source="f")
    with pytest.raises(RewardError, match="2 token rewards"):
        check_scores([Score(value=1.0, rewards=(0.5, 0.5))], [trajectory()], source="f")


def test_failures_keep_their_place():
    trajectories = [trajectory(sample_id=name) for name in ("a", "b", "c")]
    scores = [Score(value=1.0), DroppedSample(sample_id="b", reason="hung"), Score(value=3.0)]
    check_scores(scores, trajectories, source="f")
    kept, values, failed = keep_scored(trajectories, scores)
    assert [t.sample_id for t in kept] == ["a", "c"]
    assert [s.value for s in values] == [1.0, 3.0]
    assert failed == [DroppedSample(sample_id="b", reason="hung")]
    with pytest.raises(RewardError, match="failure of 'b' for sample 'a'"):
        check_scores(scores[1:] + scores[:1], trajectories, source="f")


def test_an_observation_says_one_thing():
    with pytest.raises(ValueError, match="messages and text"):
        Observation(messages=({"role": "user", "content": "x"},), text="x")
    with pytest.raises(ValueError, match="finite"):
        Observation(reward=math.inf)
