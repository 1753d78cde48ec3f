"""Forecasts from records whose truth is known, and what is said of records that are none."""

import json
import random
from dataclasses import replace

import pytest
from rlhf_core import ConfigError, DataError
from rlhf_launch.cli.main import app
from rlhf_launch.online.report import Reporter
from rlhf_launch.samples.ledger import LedgerLimits
from rlhf_launch.simulation.engines import EngineSpeed, SyncSpeed
from rlhf_launch.simulation.forecast import Alternatives, forecast
from rlhf_launch.simulation.records import RecordedSetting, read_run, recorded
from rlhf_launch.simulation.run import SimulatedRun, SimulatedSpeed, Simulation
from rlhf_launch.simulation.trainer import TrainSpeed
from typer.testing import CliRunner

SPEED = SimulatedSpeed(
    engine=EngineSpeed(alone_s=0.02, more_s=0.001),
    train=TrainSpeed(step_s=4.0, token_s=0.002),
    sync=SyncSpeed(seconds=0.5),
)
SETTING = RecordedSetting(engines=1, per_step=8, samples=4, during_training="rest")


def length_of(label, index):
    return float(1 + int(random.Random(f"{label}/{index}").expovariate(1 / 150)))


def truth(setting, steps=30):
    limits = LedgerLimits(
        per_step=setting.per_step,
        steps=steps,
        max_staleness=setting.max_staleness,
        max_in_flight=setting.max_in_flight,
    )
    run = SimulatedRun(
        limits=limits,
        samples=setting.samples,
        engines=setting.engines,
        during_training=setting.during_training,
        length_of=length_of,
        speed=SPEED,
    )
    return Simulation(run).run()


def prompts_of(report):
    """The account with the true lengths, for which a simulated sample has a few tokens only."""
    steps = {}
    for entry in report.prompts:
        lengths = [int(length_of(str(entry["position"]), index)) for index in range(4)]
        steps.setdefault(entry["step"], []).append({**entry, "lengths": lengths})
    return [{"step": step, "prompts": entries} for step, entries in steps.items()]


def records(setting=SETTING):
    report = truth(setting)
    return recorded(setting, report.rows, prompts_of(report), source="test")


def test_the_speeds_of_an_alternating_run_are_found_again():
    speed = records().speed()
    assert speed.engine.alone_s == pytest.approx(0.02, rel=0.02)
    assert speed.engine.more_s == pytest.approx(0.001, rel=0.05)
    assert speed.train.step_s == pytest.approx(4.0, rel=0.01)
    assert speed.train.token_s == pytest.approx(0.002, rel=0.01)
    assert speed.sync.seconds == pytest.approx(0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"engines": 3},
        {"during_training": "run", "max_staleness": 1},
        {"during_training": "pause", "max_staleness": 2},
        {"during_training": "run", "max_staleness": 2, "max_in_flight": 6, "per_step": 16},
    ],
)
def test_a_forecast_is_what_the_other_setting_gives(changes):
    setting = replace(SETTING, **changes)
    rows = truth(setting, steps=40).rows[4:34]
    measured = sum(row["seconds/step"] for row in rows) / len(rows)
    assert forecast(records(), setting, steps=30).step_s == pytest.approx(measured, rel=0.12)


def test_what_overlaps_tells_its_throughput():
    setting = replace(SETTING, during_training="run", max_staleness=1)
    run = records(setting)
    assert forecast(run, setting).step_s == pytest.approx(run.step_s, rel=0.25)


def test_alternatives_are_each_with_each_and_the_recorded_one_is_left_out():
    found = Alternatives(engines=[1, 2], staleness=[0, 1], in_flight=[0, 5]).of(SETTING)
    assert {(s.engines, s.max_staleness, s.max_in_flight, s.during_training) for s in found} == {
        (1, 1, 0, "run"),
        (1, 1, 5, "run"),
        (2, 0, 0, "rest"),
        (2, 1, 0, "run"),
        (2, 1, 5, "run"),
    }
    with pytest.raises(ConfigError, match="engines must be 1 or more, got 0"):
        Alternatives(engines=[0])
    with pytest.raises(ConfigError, match="settings; give lists that make 200 or fewer"):
        Alternatives(engines=range(1, 300)).of(SETTING)


@pytest.fixture
def directory(tmp_path):
    """What a run leaves, written as a run writes it."""
    report = truth(SETTING, steps=8)
    config = {"rollout": {"engines": 1, "samples_per_prompt": 4}, "train": {"prompts_per_step": 8}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    prompts = {row["step"]: row["prompts"] for row in prompts_of(report)}
    with Reporter(tmp_path, steps=8, tensorboard=False) as reporter:
        for row in report.rows:
            step = int(row["step"])
            reporter.step(step, {name: value for name, value in row.items() if name != "step"}, prompts[step])
    return tmp_path


def test_the_command_prints_a_table_with_the_recorded_setting_first(directory):
    result = CliRunner().invoke(app, ["simulate", str(directory), "--engines", "1,2", "--steps", "6"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("recorded: ")
    assert "the same, simulated" in lines[1]
    table = [line.split() for line in lines if line.strip().startswith(("alternate", "async"))]
    assert len(table) == 6
    assert table[0][0] == "alternate"
    assert table[0][-1] == "1.00x"


def test_what_is_no_run_is_named(directory, tmp_path):
    with pytest.raises(DataError, match=r"has no config.yaml; give the output directory"):
        read_run(tmp_path / "nowhere")
    (directory / "config.yaml").write_text("rollout: 7")
    with pytest.raises(DataError, match="is not the configuration of a run"):
        read_run(directory)
    result = CliRunner().invoke(app, ["simulate", str(directory), "--engines", "two"])
    assert result.exit_code == 2


def test_a_run_that_has_hardly_begun_is_refused(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:4]))
    with pytest.raises(DataError, match="2 steps with lengths and timings after the first 2"):
        read_run(directory)
