import io
import math

import pytest
from rich.console import Console
from rlhf_core import DataError
from rlhf_launch.online.report import Reporter
from rlhf_launch.planning.calibration import predicted
from rlhf_launch.planning.devices import DEVICES
from rlhf_launch.planning.published import RUNS
from rlhf_launch.planning.timing import own_calibration
from rlhf_launch.planning.work import least_seconds, published_work

WORK, DEVICE = published_work(RUNS[0]), DEVICES["a800"]
TIMES_LONGER = {"generation": 3.0, "weight sync": 2.0, "scoring": 1.5, "training": 4.0}


def write(folder, steps, **more):
    """The metrics of a run whose phases take so many times as long as they must; the first two steps ten times."""
    least = least_seconds(WORK, DEVICE)
    measured = {name: TIMES_LONGER[name] * least[name] for name in TIMES_LONGER}
    with Reporter(folder, steps=steps, tensorboard=False, console=Console(file=io.StringIO())) as reporter:
        for step in range(1, steps + 1):
            slow = 10.0 if step <= 2 else 1.0
            metrics = {
                "seconds/rollout": slow * measured["generation"],
                "seconds/sync": slow * measured["weight sync"],
                "seconds/score": slow * measured["scoring"],
                "seconds/train": slow * measured["training"],
                "seconds/step": slow * sum(measured.values()),
                "response_length": WORK.response,
            }
            reporter.step(step, metrics | more)
    return folder / "metrics.jsonl"


def test_a_runs_own_metrics_give_back_its_seconds(tmp_path):
    path = write(tmp_path, 6)
    calibration = own_calibration(path, WORK, DEVICE)
    assert "4 steps" in calibration.source
    for phase, times in TIMES_LONGER.items():
        assert calibration.lines[phase].at(1) == pytest.approx(times)
    found = predicted(WORK, DEVICE, calibration)
    least = least_seconds(WORK, DEVICE)
    assert found["step"].value == pytest.approx(sum(TIMES_LONGER[name] * least[name] for name in least))


def test_short_responses_are_less_work_for_the_same_seconds(tmp_path):
    short = own_calibration(write(tmp_path / "short", 6, response_length=WORK.response / 4), WORK, DEVICE)
    full = own_calibration(write(tmp_path / "full", 6), WORK, DEVICE)
    assert short.lines["training"].at(1) > 1.5 * full.lines["training"].at(1)


def test_a_number_that_was_not_finite_stands_for_the_longest_response(tmp_path):
    path = write(tmp_path, 6, response_length=math.nan)
    assert own_calibration(path, WORK, DEVICE).lines["training"].at(1) == pytest.approx(TIMES_LONGER["training"])


def test_too_few_steps_are_refused(tmp_path):
    with pytest.raises(DataError, match="2 steps with timings after the first 2"):
        own_calibration(write(tmp_path, 4), WORK, DEVICE)
    with pytest.raises(DataError, match="is no file"):
        own_calibration(tmp_path / "none.jsonl", WORK, DEVICE)
