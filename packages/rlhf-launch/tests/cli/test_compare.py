"""`rlhf compare`: exit codes and words."""

import json
import random

import pytest
from rlhf_launch.cli.main import app
from typer.testing import CliRunner


@pytest.fixture
def write(tmp_path):
    def write(name, rewards):
        (tmp_path / name).mkdir()
        rows = [
            {"step": step, "reward": value, "seconds/step": random.random()} for step, value in enumerate(rewards)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


def rlhf(*arguments):
    return CliRunner().invoke(app, ["compare", *arguments])


def test_equal_runs_exit_with_0(write):
    done = rlhf(write("a", [0.1] * 5), write("b", [0.1] * 5), "--exact")
    assert done.exit_code == 0
    assert "bit-equal" in done.output
    assert "every metric has the same bits" in done.output


def test_noise_exits_with_0_unless_any_difference_counts(write):
    one, other = write("a", [0.1, 0.2, 0.3, 0.1]), write("b", [0.1, 0.2, 0.3, 0.2])
    done = rlhf(one, other)
    assert done.exit_code == 0
    assert "the first difference is at step 3, in reward" in done.output
    assert "few to tell a change by" in done.output
    assert rlhf(one, other, "--exact").exit_code == 1


def test_a_change_exits_with_1(write):
    generator = random.Random(0)
    course = [generator.gauss(0, 1) for _ in range(60)]
    done = rlhf(write("a", course), write("b", [generator.gauss(4, 1) for _ in course]))
    assert done.exit_code == 1
    assert "change: reward" in done.output


def test_a_stored_history_is_a_baseline(write, tmp_path):
    one, other = write("a", [0.1] * 5), write("b", [0.2] * 5)
    file = str(tmp_path / "history.json")
    assert "2 run(s)" in rlhf(one, other, "--store", file).output
    assert rlhf(file, one).exit_code == 0


def test_what_is_wrong_exits_with_2(write, tmp_path):
    assert rlhf(write("a", [0.1])).exit_code == 2
    assert rlhf(str(tmp_path / "a"), str(tmp_path / "gone")).exit_code == 2
