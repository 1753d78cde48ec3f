"""Whole runs side by side: the first difference, the verdict, and how often it is right on simulated histories."""

import json
import math

import numpy as np
import pytest
from rlhf_core import ConfigError, DataError
from rlhf_launch.comparison.compare import compare_runs
from rlhf_launch.comparison.history import History, read_histories, store_histories


def history(name="run", **metrics):
    """A run from lists of values, of step 1 on."""
    return History(name=name, metrics={key: dict(enumerate(values, start=1)) for key, values in metrics.items()})


def learning(generator, *, name="run", steps=60, rho=0.3, shift=0.0, begin=0, distance=0.0, metrics=10):
    """A run that learns: metrics that follow a course with noise of size 1, hanging together by half."""
    shared = noise(generator, steps, rho)
    found = {}
    for index in range(metrics):
        values = 0.5 * shared + math.sqrt(0.75) * noise(generator, steps, rho)
        values += 3 * (1 - np.exp(-np.arange(steps) / 20)) + distance * generator.standard_normal()
        if index == 0:
            values[begin:] += shift
        found["reward" if index == 0 else f"other/{index}"] = values.tolist()
    return history(name, **found)


def noise(generator, steps, rho):
    pushes = generator.standard_normal(steps)
    values = [pushes[0]]
    for push in pushes[1:]:
        values.append(rho * values[-1] + math.sqrt(1 - rho**2) * push)
    return np.array(values)


def verdicts(count, compare):
    return np.mean([compare(np.random.default_rng(seed)).verdict == "change" for seed in range(count)])


def test_equal_runs_are_equal():
    one = history(reward=[0.1, 0.2, math.nan], grad_norm=[1.0, 2.0, 3.0])
    found = compare_runs([one], history("other", reward=[0.1, 0.2, math.nan], grad_norm=[1.0, 2.0, 3.0]))
    assert (found.verdict, found.equal_steps, found.first, found.metrics) == ("equal", 3, None, ())


def test_time_and_memory_have_no_part_in_the_verdict():
    one = history(reward=[1.0] * 4, **{"seconds/step": [2.0] * 4, "memory/policy/peak_step": [1.0] * 4})
    other = history(reward=[1.0] * 4, **{"seconds/step": [3.0] * 4, "memory/policy/peak_step": [1.0] * 4})
    found = compare_runs([one], other)
    assert found.verdict == "equal"
    assert {cost.name: cost.ratio for cost in found.costs} == {"seconds/step": 1.5, "memory/policy/peak_step": 1.0}


def test_the_first_difference_is_named_with_what_differs_most():
    course = [0.0, 1.0, 0.0, 1.5, 0.2, 1.1]
    one = history(reward=course, loss=course, kl=course)
    other = history("other", reward=course, loss=[*course[:3], 1.6, 0.2, 1.2], kl=[*course[:3], 9.0, 0.2, 1.1])
    found = compare_runs([one], other)
    assert (found.first, found.equal_steps, found.verdict) == (4, 3, "noise")
    assert set(found.first_metrics) == {"loss", "kl"}
    assert {metric.name for metric in found.metrics} == {"loss", "kl"}


def test_the_nearest_of_several_baselines_counts_for_the_bits():
    baselines = [history("a", reward=[1.0, 5.0, 3.0]), history("b", reward=[1.0, 2.0, 4.0])]
    found = compare_runs(baselines, history(reward=[1.0, 2.0, 3.0]))
    assert (found.nearest, found.equal_steps, found.first) == ("b", 2, 3)


def test_last_bits_of_the_generator_are_no_first_difference():
    one = history(reward=[1.0, 2.0], **{"mismatch/log_prob_max": [1e-6, 2e-6]})
    found = compare_runs([one], history(reward=[1.0, 2.0], **{"mismatch/log_prob_max": [2e-6, 1e-6]}))
    assert (found.first, found.verdict) == (None, "noise")


def test_rounding_is_noise_however_sure_it_is():
    values = np.random.default_rng(0).standard_normal(80)
    found = compare_runs([history(reward=values.tolist())], history(reward=(values + 1e-7).tolist()))
    (metric,) = found.metrics
    assert metric.p < 1e-9
    assert found.verdict == "noise"


def test_another_learning_rate_is_a_change_at_once():
    one = history(reward=[1.0, 2.0], learning_rate=[1e-6, 1e-6])
    found = compare_runs([one], history(reward=[1.0, 2.0], learning_rate=[1e-6, 1.1e-6]))
    assert found.verdict == "change"
    assert found.metrics[0].name == "learning_rate"


def test_a_metric_that_is_lost_or_not_finite_any_more_is_a_change():
    one = history(reward=[1.0, 2.0], kl=[0.1, 0.2])
    lost = compare_runs([one], history(reward=[1.0, 2.0]))
    assert (lost.verdict, lost.metrics[0].name, lost.metrics[0].remark) == (
        "change",
        "kl",
        "the run does not have it",
    )
    broken = compare_runs([one], history(reward=[1.0, 2.0], kl=[0.1, math.nan]))
    assert (broken.verdict, broken.metrics[0].remark, broken.first) == ("change", "not finite from step 2", 2)


def test_a_new_metric_is_told_of_and_no_change():
    found = compare_runs([history(reward=[1.0])], history(reward=[1.0], entropy=[0.5]))
    assert (found.verdict, found.metrics[0].remark) == ("noise", "only the run has it")


def test_runs_of_other_lengths_are_compared_over_the_steps_they_share():
    found = compare_runs([history(reward=[1.0, 2.0, 3.0])], history(reward=[1.0, 2.0]))
    assert (found.steps, found.verdict) == (2, "equal")


def test_two_runs_of_one_course_are_noise():
    def compare(generator):
        return compare_runs([learning(generator)], learning(generator))

    assert verdicts(150, compare) <= 0.03


def test_a_change_between_two_runs_is_found():
    def compare(generator):
        return compare_runs([learning(generator)], learning(generator, shift=2.5))

    assert verdicts(40, compare) >= 0.9


def test_a_change_is_found_in_the_metric_that_has_it():
    generator = np.random.default_rng(0)
    found = compare_runs([learning(generator)], learning(generator, shift=4.0))
    assert [metric.name for metric in found.metrics if metric.verdict == "change"] == ["reward"]
    assert found.metrics[0].shift_in_noise > 2


def test_a_change_half_way_is_found_too():
    def compare(generator):
        before = learning(generator, steps=120)
        return compare_runs([before], learning(generator, steps=120, shift=4.0, begin=60))

    assert verdicts(30, compare) >= 0.7


@pytest.mark.parametrize("distance", [0.0, 1.0])
def test_runs_that_keep_their_distance_are_noise_beside_several_baselines(distance):
    def compare(generator):
        runs = [learning(generator, distance=distance) for _ in range(6)]
        return compare_runs(runs[:5], runs[5])

    assert verdicts(100, compare) <= 0.03


def test_a_large_change_is_found_beside_baselines_that_keep_their_distance():
    def compare(generator):
        baselines = [learning(generator, distance=0.3, metrics=4) for _ in range(8)]
        return compare_runs(baselines, learning(generator, distance=0.3, metrics=4, shift=4.0))

    assert verdicts(30, compare) >= 0.9


def test_fewer_metrics_see_smaller_changes():
    generator = np.random.default_rng(1)
    one, other = learning(generator), learning(generator, shift=1.0)
    everything = {metric.name: metric.p for metric in compare_runs([one], other).metrics}
    (alone,) = compare_runs([one], other, metrics=["reward"]).metrics
    assert alone.p < everything["reward"]


def write_run(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_are_read_from_directories_files_and_histories(tmp_path):
    rows = [
        {"step": 1, "reward": 0.5, "loss": None},
        {"step": 1, "eval/held-out/reward": 0.25},
        {"step": 2, "reward": 1},
    ]
    run = write_run(tmp_path / "run", rows)
    (found,) = read_histories(run)
    assert found.metrics["reward"] == {1: 0.5, 2: 1.0}
    assert found.metrics["eval/held-out/reward"] == {1: 0.25}
    assert math.isnan(found.metrics["loss"][1])
    assert read_histories(run / "metrics.jsonl")[0].metrics.keys() == found.metrics.keys()
    store_histories(tmp_path / "ci" / "history.json", [found, found])
    stored = read_histories(tmp_path / "ci" / "history.json")
    assert len(stored) == 2
    assert compare_runs([tmp_path / "ci" / "history.json"], run).verdict == "equal"


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        read_histories(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        read_histories(tmp_path / "gone")
    (tmp_path / "other.json").write_text('{"format": "rlhf-history/9", "runs": []}')
    with pytest.raises(DataError, match="rlhf-history/9"):
        read_histories(tmp_path / "other.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(DataError, match="is no history"):
        read_histories(tmp_path / "text.json")
    empty = write_run(tmp_path / "empty", [])
    with pytest.raises(DataError, match="holds no metrics"):
        read_histories(empty)
    strange = write_run(tmp_path / "strange", [{"loss": 1.0}])
    with pytest.raises(DataError, match="no whole number under 'step'"):
        read_histories(strange)


def test_what_cannot_be_compared_is_refused():
    one, late = history(reward=[1.0]), History(name="late", metrics={"reward": {7: 1.0}})
    with pytest.raises(DataError, match="no step in common"):
        compare_runs([one], late)
    with pytest.raises(ConfigError, match="no run has the metric 'rewrd'"):
        compare_runs([one], one, metrics=["rewrd"])
    with pytest.raises(ConfigError, match="alpha"):
        compare_runs([one], one, alpha=0)
    with pytest.raises(ConfigError, match="at least one baseline"):
        compare_runs([], one)
