import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_algos import DataSource
from rlhf_core import ConfigError, DroppedSample, Score, Trajectory
from rlhf_launch.config.run import EvaluationSet
from rlhf_launch.online.evaluation import Evaluation, pass_at_k, summarise
from rlhf_rollout import ScoredGroup


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples, data):
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    outcomes = [True] * right + [False] * (samples - right)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def group(*values):
    trajectory = Trajectory(
        sample_id="s",
        group_id="g",
        token_ids=(1, 2, 3),
        response_mask=(False, True, True),
        rollout_log_probs=(0.0, -1.0, -1.0),
        weight_versions=(-1, 0, 0),
    )
    return ScoredGroup(
        trajectories=(trajectory,) * len(values), scores=tuple(Score(value=float(value)) for value in values)
    )


def test_metrics_of_a_set():
    groups = [group(1, 0, 0, 0), group(1, 1, 1, 1)]
    metrics = Evaluation(name="sums", step=4, metrics=summarise(groups)).named_metrics
    assert metrics["eval/sums/reward"] == pytest.approx(5 / 8)
    assert metrics["eval/sums/pass@1"] == pytest.approx((0.25 + 1) / 2)
    assert metrics["eval/sums/pass@2"] == pytest.approx((0.5 + 1) / 2)
    assert metrics["eval/sums/pass@4"] == 1
    assert metrics["eval/sums/response_length"] == 2


def test_one_sample_reports_no_pass_at_k():
    assert not any("pass@" in name for name in summarise([group(1)]))


def test_samples_without_a_score_are_counted_and_not_averaged():
    lost = DroppedSample(sample_id="s", reason="hung")
    half = ScoredGroup(trajectories=group(1).trajectories, scores=group(1).scores, dropped=(lost,))
    none = ScoredGroup(trajectories=(), scores=(), dropped=(lost, lost))
    metrics = summarise([half, none])
    assert metrics["reward"] == 1
    assert metrics["dropped_samples"] == 3


def test_a_set_without_any_score_has_no_reward():
    none = ScoredGroup(trajectories=(), scores=(), dropped=(DroppedSample(sample_id="s", reason="hung"),))
    evaluation = Evaluation(name="sums", step=1, metrics=summarise([none]))
    assert evaluation.named_metrics == {"eval/sums/dropped_samples": 1.0}
    assert math.isnan(evaluation.reward)


def test_several_greedy_samples_are_refused():
    with pytest.raises(ConfigError, match="temperature > 0"):
        EvaluationSet(data=(DataSource(path="p.jsonl"),), samples=4)
