"""The statistics behind `rlhf compare`: hand-computed values, and false alarms over simulated series."""

import math

import numpy as np
import pytest
from rlhf_launch.comparison.noise import (
    autocorrelation,
    band_p,
    effective_size,
    holm,
    paired_p,
    step_noise,
    two_sided_t,
)


def autoregressive(generator, steps, rho, runs=1):
    """[runs, steps] of unit variance, in which neighbours correlate by rho."""
    pushes = generator.standard_normal((runs, steps))
    series = np.empty((runs, steps))
    series[:, 0] = pushes[:, 0]
    for step in range(1, steps):
        series[:, step] = rho * series[:, step - 1] + math.sqrt(1 - rho**2) * pushes[:, step]
    return series


def test_a_straight_course_has_no_noise():
    assert step_noise(np.arange(9.0)) == pytest.approx(0)
    assert step_noise(np.array([1.0, 5.0])) == 0


def test_the_noise_around_a_course_is_found_whatever_the_course():
    generator = np.random.default_rng(0)
    course = 5 * (1 - np.exp(-np.arange(2000) / 300))
    assert step_noise(course + 0.3 * generator.standard_normal(2000)) == pytest.approx(0.3, rel=0.05)


def test_a_few_jumps_leave_the_noise_alone():
    generator = np.random.default_rng(1)
    values = generator.standard_normal(1000)
    values[::100] += 50
    assert step_noise(values) == pytest.approx(1.0, rel=0.15)


def test_a_metric_that_is_mostly_zero_has_noise():
    values = np.zeros(30)
    values[7] = 1.0
    # Residuals 1/2, -1, 1/2 among 28: their mean square is 1.5 / 28, times 2/3.
    assert step_noise(values) == pytest.approx(math.sqrt(1 / 28))


def test_student_t_by_the_tables():
    assert two_sided_t(12.706, 1) == pytest.approx(0.05, abs=1e-4)
    assert two_sided_t(4.303, 2) == pytest.approx(0.05, abs=1e-4)
    assert two_sided_t(-2.228, 10) == pytest.approx(0.05, abs=1e-4)
    assert two_sided_t(3.659, 29) == pytest.approx(0.001, abs=1e-5)
    assert two_sided_t(0.0, 7) == 1.0
    assert two_sided_t(1.959964, 100_000) == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize("freedom", [1, 2, 3, 8, 25])
def test_student_t_is_the_integral_of_its_density(freedom):
    grid = np.linspace(0, 1.7, 20_001)
    density = (1 + grid**2 / freedom) ** (-(freedom + 1) / 2)
    density *= math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    assert two_sided_t(1.7, freedom) == pytest.approx(1 - 2 * np.trapezoid(density, grid), abs=1e-7)


def test_holm_by_hand():
    assert holm({"a": 0.2, "b": 0.001, "c": 0.02}) == {"b": 0.003, "c": 0.04, "a": 0.2}
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


def test_the_autocorrelation_errs_on_the_high_side():
    generator = np.random.default_rng(2)
    found = [autocorrelation([series]) for series in autoregressive(generator, 60, 0.5, runs=400)]
    assert np.mean(np.array(found) > 0.5) > 0.85
    assert autocorrelation([np.ones(20)]) == 0.0
    assert effective_size(100, 0.9) == pytest.approx(100 * 0.1 / 1.9)


def test_a_pair_needs_steps():
    assert paired_p(np.zeros(50)) == 1.0
    assert paired_p(np.array([0.0, 0.0, 1.0, 2.0, 3.0])) == 1.0


def test_a_constant_difference_is_a_sign_test():
    assert paired_p(np.full(10, 0.25)) == 2.0**-9


def test_only_the_ranks_of_a_pair_count():
    differences = np.random.default_rng(6).standard_normal(40) + 0.3
    largest = np.abs(differences).argmax()
    larger = differences.copy()
    larger[largest] *= 1e9
    assert paired_p(larger) == paired_p(differences)
    assert paired_p(7 * differences) == paired_p(differences)
    assert paired_p(-differences) == pytest.approx(paired_p(differences))


def false_alarms(steps, rho, limit, runs=1500):
    generator = np.random.default_rng(3)
    differences = autoregressive(generator, steps, rho, runs) - autoregressive(generator, steps, rho, runs)
    return np.mean([paired_p(row) < limit for row in differences])


@pytest.mark.parametrize(("steps", "rho"), [(20, 0.0), (50, 0.5), (50, 0.9), (200, 0.5), (200, 0.8)])
def test_pairs_of_one_course_rarely_differ(steps, rho):
    assert false_alarms(steps, rho, 0.05) < 0.05
    assert false_alarms(steps, rho, 0.001) < 0.006


def test_a_shift_of_the_noise_is_seen_in_fifty_steps():
    generator = np.random.default_rng(4)
    pairs = generator.standard_normal((300, 50)) - generator.standard_normal((300, 50))
    assert np.mean([paired_p(row + 1.0) < 0.001 for row in pairs]) > 0.4
    assert np.mean([paired_p(row + 2.0) < 0.001 for row in pairs]) > 0.95


@pytest.mark.parametrize(("rho", "distance"), [(0.0, 0.0), (0.5, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_a_band_takes_no_run_for_another_because_runs_keep_their_distance(rho, distance):
    generator = np.random.default_rng(5)
    found = []
    for _ in range(600):
        runs = autoregressive(generator, 60, rho, 6) + distance * generator.standard_normal((6, 1))
        found.append(band_p(runs[0], runs[1:]))
    assert np.mean(np.array(found) < 0.05) < 0.075
    assert np.mean(np.array(found) < 0.001) < 0.006


def test_a_band_of_one_step_is_a_t_test_by_hand():
    # Baselines 1, 2, 3: mean 2, variance 1; a run of 6 is 4 / sqrt(1 + 1/3) away, with 2 degrees of freedom.
    assert band_p(np.array([6.0]), np.array([[1.0], [2.0], [3.0]])) == two_sided_t(4 / math.sqrt(4 / 3), 2)


def test_a_band_without_width():
    baselines = np.ones((3, 4))
    assert band_p(np.ones(4), baselines) == 1.0
    assert band_p(np.full(4, 2.0), baselines) == 0.0
