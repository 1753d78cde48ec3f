"""Normalised rewards: by numbers that are given, or measured before a run's first step."""

import asyncio
import json

import pytest
from rlhf_algos import CheckpointStore, from_mapping
from rlhf_core import ConfigError, DroppedSample, RewardScale, Score, Trajectory
from rlhf_launch.config.reward import RewardSection
from rlhf_launch.online.run import train
from rlhf_launch.samples.reward_scale import NormalizedReward, RewardScales
from rlhf_rollout import CombinedReward


def samples(*values):
    return [
        Trajectory(
            sample_id=str(value),
            group_id="g",
            token_ids=(5, 6),
            response_mask=(False, True),
            rollout_log_probs=(0.0, -1.0),
            weight_versions=(-1, 0),
            metadata={"value": value},
        )
        for value in values
    ]


class Told:
    """Gives the value that a sample names; drops those without one."""

    def __init__(self):
        self.closed = False

    async def score(self, trajectories, texts):
        values = [one.metadata["value"] for one in trajectories]
        return [
            DroppedSample(sample_id="none", reason="has no value")
            if value is None
            else Score(value=value, components={"own": 7.0}, rewards=[0.0, value])
            for value in values
        ]

    def placed(self, trajectory):
        return [0.0, 4.0]

    def close(self):
        self.closed = True


def scored(reward, *values):
    return asyncio.run(reward.score(samples(*values), [""] * len(values)))


def test_scores_less_the_mean_over_the_deviation():
    reward = NormalizedReward(Told(), RewardScale(mean=1.0, std=2.0))
    first, dropped = scored(reward, 5.0, None)
    assert first.value == 2.0
    assert first.components == {"raw": 5.0, "own": 7.0}
    assert list(first.rewards) == [0.0, 2.5]  # the mean, taken off the whole score, falls at the end
    assert isinstance(dropped, DroppedSample)
    assert list(reward.placed(samples(5.0)[0])) == [0.0, 2.0]


def test_measured_by_the_scores_of_a_block():
    reward = NormalizedReward(Told())
    with pytest.raises(RuntimeError, match="must be measured"):
        scored(reward, 1.0)
    with reward.measuring():
        assert [score.value for score in scored(reward, 1.0)] == [1.0]
        scored(reward, 5.0, None)
    assert reward.scale == RewardScale(mean=3.0, std=2.0)
    assert [score.value for score in scored(reward, 1.0, 5.0)] == [-1.0, 1.0]


def test_equal_scores_are_refused_with_the_part():
    section = from_mapping(RewardSection, {"function": "m:f", "normalize": {"function": "measured"}}, source="test")
    scales = RewardScales(section.normalize)
    reward = scales.of("function", Told())
    equal = pytest.raises(ConfigError, match=r"reward 'function': all 2 samples have the score 3, .*source: given")
    with equal, scales.measuring():
        scored(reward, 3.0, 3.0)
    with pytest.raises(ConfigError, match="no sample was scored"), scales.measuring():
        pass


def test_parts_have_scales_of_their_own_which_a_state_keeps():
    asked = {"one": {"source": "given", "mean": 1, "std": 2}, "two": {"prompts": 8}}
    section = from_mapping(
        RewardSection,
        {"parts": {name: {"kind": "length", "high": 9} for name in ("one", "two", "three")}, "normalize": asked},
        source="test",
    )
    section.all_parts(environment=False)
    scales, inner = RewardScales(section.normalize), Told()
    parts = {name: scales.of(name, inner if name == "one" else Told()) for name in ("one", "two", "three")}
    assert scales.prompts == 8
    combined = CombinedReward(parts, {"two": 10.0})
    with scales.measuring():
        scored(combined, 0.0, 4.0)
    assert scales.prompts == 0
    assert scales.state() == {"one": {"mean": 1.0, "std": 2.0}, "two": {"mean": 2.0, "std": 2.0}}
    (score,) = scored(combined, 6.0)
    assert score.value == (6 - 1) / 2 + 10 * (6 - 2) / 2 + 6
    assert score.components["two"] == 2.0
    assert score.components["two/raw"] == 6.0
    again = RewardScales(section.normalize)
    again.of("two", Told())
    again.restore(scales.state())
    assert again.metrics == {"reward_scale/two/mean": 2.0, "reward_scale/two/std": 2.0}
    combined.close()
    assert inner.closed


@pytest.mark.parametrize(
    ("normalize", "message"),
    [
        ({"other": "measured"}, r"reward\.normalize\.other: .* there are: function"),
        ({"function": {"source": "given", "mean": 1.0}}, "needs both mean and std"),
        ({"function": {"mean": 1.0, "std": 1.0}}, "write source: given"),
        ({"function": {"source": "given", "mean": 1.0, "std": 0.0}}, "std positive"),
        ({"function": {"prompts": 1}}, "at least 2, got 1"),
        ({"function": "guessed"}, "guessed"),
    ],
)
def test_what_is_refused(settings, make_config, normalize, message):
    with pytest.raises(ConfigError, match=message):
        make_config(settings, reward__normalize=normalize)


@pytest.mark.stack
def test_a_run_measures_once_and_a_resumed_one_keeps_the_numbers(settings, make_config, folder):
    settings["reward"] = {"model": str(folder / "reward"), "normalize": {"model": {"prompts": 16}}}
    settings["algorithm"] = {"name": "ppo"}
    settings["train"] |= {"max_tokens_per_micro_batch": 512, "prompts_per_step": 8, "steps": 2}
    settings |= {"checkpoint": {"every": 1}, "tensorboard": False}
    first = train(make_config(settings, train__steps=1))
    saved = CheckpointStore(first.folder / "checkpoints").latest().state["reward_scales"]["model"]
    run = train(make_config(settings), resume=True)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    assert len(rows) == 2
    for row in rows:
        assert {name: row[f"reward_scale/model/{name}"] for name in ("mean", "std")} == saved
        assert row["reward"] == pytest.approx((row["reward/raw"] - saved["mean"]) / saved["std"], rel=1e-5)
    # The first step's samples are of the policy that was measured: about mean 0 and deviation 1.
    assert abs(rows[0]["reward"]) < 0.6
    assert 0.5 < rows[0]["reward_std"] < 2
    assert abs(rows[0]["reward/raw"] / saved["std"]) > 0.01
