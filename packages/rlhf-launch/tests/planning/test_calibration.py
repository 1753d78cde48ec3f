import math
from dataclasses import replace

import pytest
from rlhf_launch.planning.calibration import Line, Point, left_out, predicted, published_calibration
from rlhf_launch.planning.devices import DEVICES
from rlhf_launch.planning.published import RUNS
from rlhf_launch.planning.work import least_seconds, published_work


def test_points_on_a_level_line_are_predicted_by_each_other():
    points = [Point(ways=ways, excess=0.7) for ways in (1, 1, 2, 4)]
    assert left_out(points) == pytest.approx([0.0] * 4)
    line = Line.through(points)
    assert line.at(8) == pytest.approx(math.exp(0.7))
    assert line.error == pytest.approx(0.0)


def test_a_slope_is_followed_and_an_outlier_makes_the_bar_wide():
    steep = Line.through([Point(ways=ways, excess=math.log2(ways)) for ways in (1, 2, 4, 8)])
    assert 0.8 < steep.slope < 1.0
    odd = Line.through([Point(ways=1, excess=excess) for excess in (0.0, 0.0, 0.0, 2.0)])
    # The outlier is 2 off from the others, each of which is 2/3 off from the mean of the rest.
    assert odd.error == pytest.approx(math.sqrt((4 + 3 * (2 / 3) ** 2) / 4))


def test_training_of_the_published_7b_run_has_its_products():
    work = published_work(RUNS[0])
    # Eight operations a parameter and token: forwards twice, backwards twice as much; on four GPUs.
    products = 8 * 6.738e9 * 1024 * 2048 / (4 * 312e12)
    # Adam in host memory: 34 bytes an element over the link of each of four GPUs, once.
    least = products + 34 * 6.738e9 / (4 * 25e9)
    assert least_seconds(work, DEVICES["a800"])["training"] == pytest.approx(least)


def test_roles_that_share_devices_take_turns():
    together = published_work(RUNS[4])
    alone = least_seconds(together, DEVICES["a800"])["training"]
    each = 8 * 6.738e9 * 1024 * 2048 / (16 * 312e12) + 34 * 6.738e9 / (16 * 25e9)
    assert alone == pytest.approx(2 * each)


def test_small_micro_batches_gather_weights_longer_than_they_compute():
    work = published_work(RUNS[0])
    small = replace(work, roles=[replace(one, micro_tokens=64, offloaded=0.0) for one in work.roles])
    # On each of four GPUs 8,192 micro-batches, each with three times 13.5 GB over the link.
    assert least_seconds(small, DEVICES["a800"])["training"] == pytest.approx(8192 * 3 * 2 * 6.738e9 / 200e9)
    apart = replace(small, host_gpus=2)
    assert least_seconds(apart, DEVICES["a800"])["training"] == pytest.approx(8192 * 3 * 2 * 6.738e9 / 25e9)


def test_with_overlap_a_step_takes_as_long_as_its_longer_part_and_the_sync():
    work = published_work(RUNS[0])
    phases = predicted(work, DEVICES["a800"], published_calibration())
    both = predicted(replace(work, overlaps=True), DEVICES["a800"], published_calibration())
    training = phases["scoring"].value + phases["training"].value
    longer = max(phases["generation"].value, training)
    assert both["step"].value == pytest.approx(longer + phases["weight sync"].value)
    assert both["step"].value < phases["step"].value


def test_training_is_known_best_and_no_phase_by_less_than_a_factor_of_three():
    lines = published_calibration().lines
    assert lines["training"].error < math.log(1.2)
    assert max(line.error for line in lines.values()) < math.log(3)
