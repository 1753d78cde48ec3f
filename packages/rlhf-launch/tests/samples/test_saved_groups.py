"""Groups come back from a checkpoint to the last bit, whatever they hold."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_core import DroppedSample, LogProbMeaning, Score, Trajectory
from rlhf_launch.samples.saved_groups import can_be_saved, pack_groups, unpack_groups
from rlhf_rollout import ScoredGroup
from safetensors.torch import load_file, save_file

numbers = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def trajectories(draw):
    length = draw(st.integers(2, 6))
    mask = (False, *(draw(st.booleans()) for _ in range(length - 1)))
    log_probs = st.floats(-1e3, 0, allow_nan=False)
    rewards = tuple(draw(numbers) if sampled else 0.0 for sampled in mask) if draw(st.booleans()) else ()
    return Trajectory(
        sample_id=draw(st.text(max_size=3)),
        group_id="g",
        token_ids=tuple(draw(st.integers(0, 2**31 - 1)) for _ in mask),
        response_mask=mask,
        rollout_log_probs=tuple(draw(log_probs) if sampled else 0.0 for sampled in mask),
        weight_versions=tuple(draw(st.integers(0, 9)) if sampled else -1 for sampled in mask),
        meaning=LogProbMeaning(temperature=draw(st.sampled_from([0.5, 1.0]))),
        truncated=draw(st.booleans()),
        metadata={"answer": draw(st.text(max_size=3)), "rows": [1, None]},
        rewards=rewards,
    )


@st.composite
def scored_groups(draw):
    samples = draw(st.lists(trajectories(), max_size=3))
    scores = [
        Score(value=draw(numbers), components={"a": draw(numbers)}, rewards=(0.5,) * draw(st.integers(0, 2)))
        for _ in samples
    ]
    return ScoredGroup(
        trajectories=tuple(samples),
        scores=tuple(scores),
        dropped=(DroppedSample(sample_id="d", reason="hung"),) * draw(st.integers(0, 1)),
        greedy_score=draw(st.none() | numbers),
    )


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(scored_groups(), max_size=4))
def test_groups_come_back_as_they_were(groups, tmp_path_factory):
    packed = pack_groups(groups)
    if packed:
        file = tmp_path_factory.mktemp("packed") / "state.safetensors"
        save_file(packed, file)
        packed = load_file(file)
    assert unpack_groups(packed) == groups


def trajectory(**fields):
    made = Trajectory(
        sample_id="0/0",
        group_id="0",
        token_ids=(1, 2),
        response_mask=(False, True),
        rollout_log_probs=(0.0, -0.1),
        weight_versions=(-1, 0),
    )
    return dataclasses.replace(made, **fields)


def test_what_no_file_can_hold_is_known():
    for sample, expected in (
        (trajectory(), True),
        (trajectory(metadata={"day": object()}), False),
        (trajectory(images=(object(),)), False),
    ):
        assert can_be_saved(ScoredGroup(trajectories=(sample,), scores=(Score(value=1.0),))) is expected


def test_a_token_takes_13_bytes():
    long = trajectory(
        token_ids=(1,) * 1000,
        response_mask=(False, *(True,) * 999),
        rollout_log_probs=(0.0, *(-0.1,) * 999),
        weight_versions=(-1, *(0,) * 999),
    )
    packed = pack_groups([ScoredGroup(trajectories=(long,), scores=(Score(value=1.0),))])
    assert sum(tensor.numel() * tensor.element_size() for tensor in packed.values()) < 13 * 1000 + 600
    assert packed["rollout_log_probs"].dtype == torch.float32
